#include "check.h"

namespace vmps {
namespace {

std::string triple(const unsigned v[3]) {
  return "(" + std::to_string(v[0]) + ", " + std::to_string(v[1]) + ", " + std::to_string(v[2]) + ")";
}

std::string name_of(const Region& region) {
  const std::string name = region.name.empty() ? "" : "'" + region.name + "' ";
  if (region.is_variable) return "threadgroup variable " + name;
  const char* kind = region.space == Space::device ? "buffer(" : "threadgroup(";
  return name + kind + std::to_string(region.index) + ") ";
}

}  // namespace

void Check::launch_begins(Run&) { reports_.clear(); }

void Check::access(Run& run, const Access& access) {
  if (!access.inside) return report(run, access, "out of bounds", "");
  if (reinterpret_cast<uintptr_t>(access.address()) % access.site.alignment) report(run, access, "misaligned", "");
}

std::string Check::verdict(Run&) { return reports_.empty() ? "" : "checked mode:" + reports_.text(); }

void Check::report(Run& run, const Access& access, const char* what, const std::string& more) {
  if (!reports_.is_new(what, access.site.location)) return;
  reports_.add(std::string(what) + ": thread " + triple(access.lane.position) + " of threadgroup " +
               triple(run.threadgroup->position) + " " + name_of(access.region) + std::to_string(access.offset) +
               " of " + std::to_string(access.region.size) + " at " + access.site.location + more);
}

}  // namespace vmps
