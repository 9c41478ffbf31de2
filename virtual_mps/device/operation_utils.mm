// The helpers of ATen/native/mps/OperationUtils.h that do not need MPSGraph.
#include <ATen/native/mps/Copy.h>
#include <ATen/native/mps/OperationUtils.h>

#include <ATen/ops/scalar_tensor.h>

#include "../metal/buffer_c.h"
#include "memory.h"

namespace at::mps {

// Profiling is always off. The object is only asked whether it is on, which all-zero memory answers with no.
Profiler::MPSProfiler& getMPSProfiler() {
  alignas(Profiler::MPSProfiler) static char off[sizeof(Profiler::MPSProfiler)];
  return *reinterpret_cast<Profiler::MPSProfiler*>(off);
}

namespace Profiler {
uint64_t MPSProfiler::beginProfileKernel(const void*, const std::string&, bool) { return 0; }
uint64_t MPSProfiler::beginProfileKernel(const void*, const std::string&, const TensorList&) { return 0; }
void MPSProfiler::beginProfileGPUInterval(const void*) {}
void MPSProfiler::endProfileKernel(const void*, SyncType) {}
bool MPSProfiler::isCaptureEnabled() const { return false; }
bool MPSProfiler::isCapturing() const { return false; }
void MPSProfiler::startCapture(const std::string&, MPSStream*) {
  TORCH_CHECK(false, "virtual_mps cannot capture a GPU trace; ask isCaptureEnabled() first");
}
void MPSProfiler::stopCapture(MPSStream*) {}
}  // namespace Profiler

}  // namespace at::mps

namespace at::native::mps {

MPSKernelCache* MPSKernelCache::_instance_cache = nullptr;
MPSGraphCache* MPSGraphCache::_instance_cache = nullptr;

namespace {

struct TypeNames {
  ScalarType type;
  const char *metal, *full, *brief;
  MPSDataType mps;
};

constexpr TypeNames kTypes[] = {
    {kFloat, "float", "Float32", "f32", MPSDataTypeFloat32},
    {kHalf, "half", "Float16", "f16", MPSDataTypeFloat16},
    {kBFloat16, "bfloat", "BFloat16", "bf16", MPSDataTypeBFloat16},
    {kInt, "int", "Int32", "i32", MPSDataTypeInt32},
    {kLong, "long", "Int64", "i64", MPSDataTypeInt64},
    {kShort, "short", "Int16", "i16", MPSDataTypeInt16},
    {kChar, "char", "Int8", "i8", MPSDataTypeInt8},
    {kByte, "uchar", "UInt8", "u8", MPSDataTypeUInt8},
    {kUInt16, "ushort", "UInt16", "u16", MPSDataTypeUInt16},
    {kUInt32, "uint", "UInt32", "u32", MPSDataTypeUInt32},
    {kUInt64, "ulong", "UInt64", "u64", MPSDataTypeUInt64},
    {kBool, "bool", "Bool", "b8", MPSDataTypeBool},
    {kComplexHalf, "half2", "ComplexFloat16", "c16", MPSDataTypeInvalid},
    {kComplexFloat, "float2", "ComplexFloat32", "c32", MPSDataTypeInvalid},
};

const TypeNames& names_of(ScalarType type) {
  for (auto& names : kTypes)
    if (names.type == type) return names;
  TORCH_CHECK_TYPE(type != kDouble, "Cannot convert a float64 Tensor to MPS as the MPS framework doesn't support "
                                    "float64. Please use float32 instead.");
  TORCH_CHECK(false, "Undefined type ", type);
}

}  // namespace

std::string scalarToMetalTypeString(const c10::ScalarType& type) { return names_of(type).metal; }

std::string getMPSTypeString(ScalarType type, bool short_name) {
  return short_name ? names_of(type).brief : names_of(type).full;
}

MPSDataType getMPSDataType(ScalarType type) { return names_of(type).mps; }
MPSDataType getMPSScalarType(ScalarType type) { return type == kDouble ? MPSDataTypeFloat32 : names_of(type).mps; }

MPSScalar getMPSScalar(const Scalar& scalar, ScalarType type) {
  MPSScalar result;
  result.type = type == kDouble ? kFloat : type;
  result.size = c10::elementSize(result.type);
  switch (result.type) {
    case kFloat:
      result.value.f = scalar.to<float>();
      break;
    case kHalf:
      result.value.h = scalar.to<Half>();
      break;
    case kBFloat16:
      result.value.bf16 = scalar.to<BFloat16>();
      break;
    case kComplexFloat:
      result.value.cf = scalar.to<c10::complex<float>>();
      break;
    case kComplexHalf:
      result.value.ch = scalar.to<c10::complex<Half>>();
      break;
    case kBool:
      result.value.i = scalar.to<bool>();
      break;
    case kUInt64:
      result.value.u = scalar.to<uint64_t>();
      break;
    default:  // the low bytes of a 64-bit integer are those of a shorter one
      result.value.i = scalar.to<int64_t>();
  }
  return result;
}

std::string getArrayRefString(const IntArrayRef values) {
  std::string text;
  for (int64_t value : values) text += (text.empty() ? "" : ",") + std::to_string(value);
  return text;
}

std::string getTensorsStringKey(const TensorList& tensors, bool short_dtype, bool exclude_shape) {
  std::string key;
  for (const Tensor& tensor : tensors) {
    key += ":";
    if (!tensor.defined()) {
      key += "Undefined";
      continue;
    }
    key += getMPSTypeString(tensor.scalar_type(), short_dtype) + "[";
    if (tensor.dim() == 0)
      key += "Scalar";
    else
      key += exclude_shape ? "-1" : getArrayRefString(tensor.sizes());
    key += "]";
  }
  return key;
}

MPSShape* getMPSShape(IntArrayRef sizes, c10::MemoryFormat) {
  NSMutableArray* shape = [NSMutableArray arrayWithCapacity:sizes.size()];
  if (sizes.empty()) [shape addObject:[NSNumber numberWithInteger:1]];
  for (int64_t size : sizes) [shape addObject:[NSNumber numberWithInteger:size]];
  return shape;
}

MPSShape* getMPSShape(const TensorBase& tensor, c10::MemoryFormat format) {
  return getMPSShape(tensor.sizes(), format);
}

std::string getMPSShapeString(MPSShape* shape) {
  std::string text;
  for (NSNumber* size in shape) text += std::to_string(size.integerValue) + ",";
  return text;
}

size_t compute_storage_numel_distance(const TensorBase& tensor) {
  size_t distance = 1;
  if (tensor.numel() == 0) return 0;
  for (int64_t dim = 0; dim < tensor.dim(); dim++) distance += (tensor.size(dim) - 1) * tensor.stride(dim);
  return distance;
}

Tensor wrapped_scalar_tensor_mps(const Scalar& scalar, const Device device) {
  const ScalarType type = scalar.isFloatingPoint() ? kFloat : scalar.isComplex() ? kComplexFloat : scalar.type();
  Tensor tensor = at::scalar_tensor(scalar, TensorOptions().dtype(type).device(device));
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

Tensor& mps_copy_(Tensor& destination, const Tensor& source, bool non_blocking) {
  return destination.copy_(source, non_blocking);
}

void copy_blit_mps(void* destination, const void* source, size_t size) {
  at::mps::getCurrentMPSStream()->copy_and_sync((id<MTLBuffer>)source, (id<MTLBuffer>)destination, size, 0, 0,
                                                /*non_blocking=*/true, 0);
}

}  // namespace at::native::mps
