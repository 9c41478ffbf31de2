// Takes the place of the GPU in a copy of csrc: writes down what `dispatch` is asked for. recording.py calls it.
#pragma once

#include <cxxabi.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <typeinfo>
#include <vector>

namespace recorder {

// Types of the plain bytes among the arguments of the next dispatch, in slot order.
inline thread_local std::vector<std::string> types;

template <typename T>
size_t size_of() {
  char* name = abi::__cxa_demangle(typeid(T).name(), nullptr, nullptr, nullptr);
  types.emplace_back(name);
  std::free(name);
  return sizeof(T);
}

// The largest threadgroup that every pipeline takes.
inline uint32_t max_threads() { return std::atoi(std::getenv("METALK_RECORDER_THREADS")); }

// One line of JSON for a dispatch.
template <typename Launch, typename Arguments>
void record(const Launch& launch, const Arguments& arguments) {
  std::string text = std::string("{\"library\": \"") + launch.library + "\", \"kernel\": \"" + launch.kernel + "\"";
  text += ", \"threads\": " + std::to_string(launch.threads);
  text += ", \"threadgroup_bytes\": " + std::to_string(launch.threadgroup_bytes) + ", \"constants\": [";
  for (bool constant : launch.constants) {
    text += text.back() == '[' ? "" : ", ";
    text += constant ? "true" : "false";
  }
  text += "], \"arguments\": [";
  size_t next_type = 0;
  for (const auto& argument : arguments) {
    text += text.back() == '[' ? "" : ", ";
    if (argument.bytes()) {
      text += "{\"bytes\": " + std::to_string(argument.size()) + ", \"type\": \"" + types.at(next_type++) + "\"}";
    } else if (argument.tensor() && argument.tensor()->defined()) {
      text += std::string("{\"dtype\": \"") + c10::toString(argument.tensor()->scalar_type()) + "\"}";
    } else {
      text += "{}";
    }
  }
  types.clear();
  std::FILE* file = std::fopen(std::getenv("METALK_RECORDER_FILE"), "a");
  std::fprintf(file, "%s]}\n", text.c_str());
  std::fclose(file);
}

}  // namespace recorder
