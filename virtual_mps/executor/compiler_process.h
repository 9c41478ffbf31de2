// Calls `python -m virtual_mps.compiler`, and knows where the disk cache is.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

namespace vmps {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void configure(const char* python, const char* python_path, const char* cache_directory);

// The folder of the cache that belongs to this version of the compiler.
std::string cache_directory();

// Throws Error with what the compiler wrote to stderr if it does not succeed.
void call_compiler(const std::vector<std::string>& arguments);

// A fresh folder for one source text, removed with everything in it at the end.
class ScratchSource {
 public:
  explicit ScratchSource(std::string_view text);
  ~ScratchSource();
  ScratchSource(const ScratchSource&) = delete;
  ScratchSource& operator=(const ScratchSource&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string directory_, path_;
};

}  // namespace vmps
