// The tensors of one op call as CPU tensors on the same memory, and the way back.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <unordered_map>

namespace vmps {

// Each MPS storage gets one CPU storage, and each MPS tensor one CPU tensor, so that aliasing within the call survives.
// Nothing is copied in either direction. A sparse (COO) tensor has no storage: its indices and values are tensors that
// do.
class HostView {
 public:
  at::Tensor to_host(const at::Tensor& tensor);  // a CPU tensor passes through
  c10::Storage to_host(const c10::Storage& device);

  // Takes over what the op did to its arguments: resize_, set_, transpose_ and out= change sizes, strides and storages.
  void write_back();
  at::Tensor to_device(const at::Tensor& result);  // an argument that the op returns comes back as that very tensor

  bool has_device_tensors() const { return !tensors_.empty(); }
  bool has_complex128() const { return has_complex128_; }
  c10::ArrayRef<at::Tensor> host_arguments() const { return host_arguments_; }

 private:
  struct StoragePair {
    c10::Storage device, host;
    const void* address;  // what the host storage was at first
    size_t bytes;
  };
  struct TensorPair {
    at::Tensor device, host;
  };

  // Which pair holds an object. Calls with many tensors (fused optimizers) would make a linear search quadratic.
  class Index {
   public:
    int find(const void* object) const;
    void add(const void* object);

   private:
    static constexpr size_t kLinear = 24;
    c10::SmallVector<const void*, kLinear> objects_;
    std::unordered_map<const void*, int> map_;
  };

  c10::Storage to_device(const c10::Storage& host);
  at::Tensor sparse_to_host(const at::Tensor& tensor);
  at::Tensor sparse_to_device(const at::Tensor& result);
  void add(StoragePair pair);
  void add(TensorPair pair);

  c10::SmallVector<StoragePair, 8> storages_;
  c10::SmallVector<TensorPair, 8> tensors_;
  c10::SmallVector<at::Tensor, 4> host_arguments_;
  bool has_complex128_ = false;  // on the device
  Index device_storages_, host_storages_, device_tensors_, host_tensors_;
};

}  // namespace vmps
