// The only way to the GPU: `dispatch` encodes one kernel on PyTorch's MPS stream. `commit` is there for one operator.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

namespace torch_metalk {

// Buffer slots and bytes of setBytes that Metal has (Metal feature set tables).
constexpr size_t kMaxSlots = 31;
constexpr size_t kMaxBytes = 4096;

// What a kernel declares in one of its slots: a tensor, an absent optional, or plain bytes (at most kMaxBytes).
class Argument {
 public:
  Argument(const at::Tensor& tensor) : tensor_(&tensor) {}  // NOLINT: implicit, so that a call reads like one
  Argument(const std::optional<at::Tensor>& tensor) : tensor_(tensor ? &*tensor : nullptr) {}  // NOLINT
  template <typename T, std::enable_if_t<std::is_trivially_copyable_v<T>, int> = 0>
  Argument(const T& value) : bytes_(&value), size_(sizeof(T)) {}  // NOLINT
  template <typename T>
  Argument(const std::vector<T>& values) : bytes_(values.data()), size_(values.size() * sizeof(T)) {}  // NOLINT

  const at::Tensor* tensor() const { return tensor_; }
  const void* bytes() const { return bytes_; }
  size_t size() const { return size_; }

 private:
  const at::Tensor* tensor_ = nullptr;
  const void* bytes_ = nullptr;
  size_t size_ = 0;
};

struct Launch {
  const char* library;          // the shader's file name without suffix
  std::string kernel;           // the kernel's host_name
  std::vector<bool> constants;  // function constants from index 0
  std::array<uint64_t, 3> threadgroups;
  uint32_t threads;  // threads per threadgroup
  uint32_t threadgroup_bytes = 0;
  bool after_previous = false;  // reads what the previous dispatch of the same operator wrote
  // What `max_threads` found for this kernel and these constants, so that `dispatch` need not look again.
  const void* pipeline = nullptr;
};

// Encodes `launch` with its arguments in slot order, on the current stream's own encoder. Whole threadgroups only.
// Never ends the encoder, commits or waits. Allocate outputs and make copies before: ATen operators end the encoder.
void dispatch(const Launch& launch, std::initializer_list<Argument> arguments);

// Submits what is encoded on the current stream, and with `wait` returns when the GPU has done it. matmul_rows_split
// alone may call it: its CPU half reads and writes the memory that the GPU does, at the same time.
void commit(bool wait);

// Where the CPU finds a tensor's first element, or nullptr where its buffer is not visible to it.
void* host_memory(const at::Tensor& tensor);

// False makes every buffer one that the CPU cannot see. For tests.
extern bool buffers_are_shared;

// The largest threadgroup that the pipeline of this kernel takes on this device.
uint32_t max_threads(Launch& launch);

// Chooses between the kernels that work on one row in a threadgroup, and the threads of a threadgroup:
// `<stem>_single_row<types>` with one vector of four columns a thread, or with two, by a further function constant at
// the end, or `<stem>_looped<types>`.
void choose_row_kernel(Launch& launch, const std::string& stem, const std::string& types, int64_t columns);

// What Metal calls the device: "Apple M1 Pro".
std::string device_name();

// Whether the GPU is one of the large ones, of a Max or Ultra chip, by the device's name. Tests change it.
bool& is_large_chip();

// "float", "half" or "bfloat": how a dtype is called in the names of kernels.
const char* metal_type(at::ScalarType dtype);

}  // namespace torch_metalk
