// Findings of one launch, each told once with how often it was made.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace vmps {

class Reports {
 public:
  void clear();
  // True for the first finding of its kind (what is wrong, and where in the source): then add() it.
  bool is_new(const char* what, const char* where);
  void add(const std::string& text);
  bool empty() const { return kinds_.empty(); }
  std::string text() const;

 private:
  static constexpr size_t kMost = 8;  // told in full
  struct Kind {
    size_t text;  // kMost: one of those that are only counted
    uint64_t times;
  };
  std::map<std::pair<std::string, std::string>, Kind> kinds_;
  std::vector<std::string> texts_;
};

}  // namespace vmps
