#include "reports.h"

namespace vmps {

void Reports::clear() {
  kinds_.clear();
  texts_.clear();
}

bool Reports::is_new(const char* what, const char* where) {
  auto [kind, is_first] = kinds_.try_emplace({what, where}, Kind{texts_.size() < kMost ? texts_.size() : kMost, 0});
  kind->second.times++;
  return is_first && kind->second.text < kMost;
}

void Reports::add(const std::string& text) { texts_.push_back(text); }

std::string Reports::text() const {
  std::vector<uint64_t> times(texts_.size());
  size_t more = 0;
  for (auto& [_, kind] : kinds_) {
    if (kind.text < times.size())
      times[kind.text] = kind.times;
    else
      more++;
  }
  std::string all;
  for (size_t i = 0; i < texts_.size(); i++) {
    all += (texts_.size() > 1 ? "\n  " : " ") + texts_[i];
    if (times[i] > 1) all += " (" + std::to_string(times[i]) + " times)";
  }
  if (more) all += "\n  and " + std::to_string(more) + " more kinds of findings";
  return all;
}

}  // namespace vmps
