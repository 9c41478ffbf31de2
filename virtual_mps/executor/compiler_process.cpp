#include "compiler_process.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <string_view>

extern char** environ;

namespace vmps {
namespace {

namespace fs = std::filesystem;

std::mutex settings_mutex;
std::string set_python, set_python_path, set_cache_directory;

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

std::string setting(const std::string& set) {
  std::lock_guard<std::mutex> lock(settings_mutex);
  return set;
}

// The parent's environment with what the child needs to find the package, and nothing in its working directory instead.
std::vector<std::string> child_environment() {
  std::string path = setting(set_python_path);
  const std::string inherited = environment("PYTHONPATH");
  if (!path.empty() && !inherited.empty()) path += ':';
  path += inherited;
  std::vector<std::string> variables = {"PYTHONPATH=" + path, "PYTHONSAFEPATH=1",
                                        "VIRTUAL_MPS_CACHE=" + fs::path(cache_directory()).parent_path().string()};
  for (char** v = environ; *v; v++) {
    const std::string_view entry = *v;
    const std::string name(entry.substr(0, entry.find('=') + 1));
    if (name != "PYTHONPATH=" && name != "PYTHONSAFEPATH=" && name != "VIRTUAL_MPS_CACHE=")
      variables.emplace_back(entry);
  }
  return variables;
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (std::string& s : strings) result.push_back(s.data());
  result.push_back(nullptr);
  return result;
}

std::string read_all(int descriptor) {
  std::string text;
  char chunk[4096];
  for (;;) {
    const ssize_t n = read(descriptor, chunk, sizeof chunk);
    if (n > 0)
      text.append(chunk, static_cast<size_t>(n));
    else if (n == 0 || errno != EINTR)
      return text;
  }
}

}  // namespace

void configure(const char* python, const char* python_path, const char* cache_directory) {
  std::lock_guard<std::mutex> lock(settings_mutex);
  if (python) set_python = python;
  if (python_path) set_python_path = python_path;
  if (cache_directory) set_cache_directory = cache_directory;
}

std::string cache_directory() {
  fs::path root = setting(set_cache_directory);
  if (root.empty()) root = environment("VIRTUAL_MPS_CACHE");
  if (root.empty() && !environment("XDG_CACHE_HOME").empty())
    root = fs::path(environment("XDG_CACHE_HOME")) / "virtual_mps";
  if (root.empty()) root = fs::path(environment("HOME")) / ".cache" / "virtual_mps";
  return root / VMPS_COMPILER_ID;
}

void call_compiler(const std::vector<std::string>& arguments) {
  std::string python = setting(set_python);
  if (python.empty()) python = environment("VIRTUAL_MPS_PYTHON");
  if (python.empty()) python = "python3";
  std::vector<std::string> command = {python, "-m", "virtual_mps.compiler"};
  command.insert(command.end(), arguments.begin(), arguments.end());
  std::vector<std::string> variables = child_environment();

  int output[2];
  if (pipe2(output, O_CLOEXEC) != 0) throw Error(std::string("cannot start the shader compiler: ") + strerror(errno));
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, output[1], 2);
  pid_t child;
  const int failed =
      posix_spawnp(&child, python.c_str(), &actions, nullptr, pointers(command).data(), pointers(variables).data());
  posix_spawn_file_actions_destroy(&actions);
  close(output[1]);
  std::string message = read_all(output[0]);
  close(output[0]);
  if (failed) throw Error("cannot start the shader compiler: " + python + ": " + strerror(failed));

  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (status == 0) return;
  while (!message.empty() && message.back() == '\n') message.pop_back();
  if (message.empty()) message = "the shader compiler failed without a message (status " + std::to_string(status) + ")";
  throw Error(message);
}

ScratchSource::ScratchSource(std::string_view text) {
  std::string pattern = (fs::temp_directory_path() / "virtual_mps-XXXXXX").string();
  if (!mkdtemp(pattern.data())) throw Error("cannot make a folder in " + pattern + ": " + strerror(errno));
  directory_ = pattern;
  path_ = directory_ + "/source.metal";
  std::ofstream(path_, std::ios::binary) << text;
}

ScratchSource::~ScratchSource() {
  std::error_code ignored;
  fs::remove_all(directory_, ignored);
}

}  // namespace vmps
