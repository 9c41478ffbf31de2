// Checked mode: the observer that reports what a kernel must not do.
#pragma once

#include "instrument.h"
#include "reports.h"

namespace vmps {

class Check final : public Observer {
 public:
  void launch_begins(Run&) override;
  void access(Run&, const Access&) override;
  std::string verdict(Run&) override;

 private:
  void report(Run& run, const Access& access, const char* what, const std::string& more);
  Reports reports_;
};

}  // namespace vmps
