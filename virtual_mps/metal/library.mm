// MTLLibrary, MTLFunction and MTLComputePipelineState: what the shader compiler made, as objects.
#import "library.h"

#include <map>
#include <string_view>

NSString* const MTLLibraryErrorDomain = @"MTLLibraryErrorDomain";

namespace {

// A metallib of this package: this line, then for each source its length in bytes, a newline, and the preprocessed
// text.
constexpr std::string_view kMetallibMagic = "virtual_mps metallib 1\n";

size_t size_of(MTLDataType type) {
  switch (type) {
    case MTLDataTypeBool:
    case MTLDataTypeChar:
    case MTLDataTypeUChar:
      return 1;
    case MTLDataTypeHalf:
    case MTLDataTypeBFloat:
    case MTLDataTypeShort:
    case MTLDataTypeUShort:
    case MTLDataTypeBool2:
    case MTLDataTypeChar2:
    case MTLDataTypeUChar2:
      return 2;
    case MTLDataTypeFloat2:
    case MTLDataTypeInt2:
    case MTLDataTypeUInt2:
    case MTLDataTypeHalf3:
    case MTLDataTypeHalf4:
    case MTLDataTypeBFloat3:
    case MTLDataTypeBFloat4:
    case MTLDataTypeShort3:
    case MTLDataTypeShort4:
    case MTLDataTypeUShort3:
    case MTLDataTypeUShort4:
    case MTLDataTypeLong:
    case MTLDataTypeULong:
      return 8;
    case MTLDataTypeFloat3:
    case MTLDataTypeFloat4:
    case MTLDataTypeInt3:
    case MTLDataTypeInt4:
    case MTLDataTypeUInt3:
    case MTLDataTypeUInt4:
    case MTLDataTypeLong2:
    case MTLDataTypeULong2:
      return 16;
    case MTLDataTypeLong3:
    case MTLDataTypeLong4:
    case MTLDataTypeULong3:
    case MTLDataTypeULong4:
      return 32;
    default:  // float, int, uint, and vectors of four bytes
      return 4;
  }
}

struct Constants {
  std::map<NSUInteger, std::string> by_index;
  std::map<std::string, std::string> by_name;

  std::vector<vmps_constant> list() const {
    std::vector<vmps_constant> all;
    for (auto& [index, value] : by_index) all.push_back({nullptr, uint32_t(index), value.data(), value.size()});
    for (auto& [name, value] : by_name) all.push_back({name.c_str(), 0, value.data(), value.size()});
    return all;
  }
};

}  // namespace

@interface MTLFunctionConstantValues () {
 @public
  Constants* constants;
}
@end

@implementation MTLFunctionConstantValues
- (instancetype)init {
  self = [super init];
  if (self) constants = new Constants;
  return self;
}
- (void)dealloc {
  delete constants;
  [super dealloc];
}
- (id)copyWithZone:(NSZone*)zone {
  MTLFunctionConstantValues* copy = [[MTLFunctionConstantValues allocWithZone:zone] init];
  *copy->constants = *constants;
  return copy;
}
- (void)setConstantValue:(const void*)value type:(MTLDataType)type atIndex:(NSUInteger)index {
  constants->by_index[index].assign(static_cast<const char*>(value), size_of(type));
}
- (void)setConstantValues:(const void*)values type:(MTLDataType)type withRange:(NSRange)range {
  for (NSUInteger i = 0; i < range.length; i++)
    [self setConstantValue:static_cast<const char*>(values) + i * size_of(type) type:type atIndex:range.location + i];
}
- (void)setConstantValue:(const void*)value type:(MTLDataType)type withName:(NSString*)name {
  constants->by_name[name.UTF8String].assign(static_cast<const char*>(value), size_of(type));
}
- (void)reset {
  *constants = {};
}
@end

@implementation MTLCompileOptions
@synthesize preprocessorMacros, fastMathEnabled, mathMode, mathFloatingPointFunctions, languageVersion,
    preserveInvariance;
- (instancetype)init {
  self = [super init];
  if (self) {
    fastMathEnabled = YES;
    mathMode = MTLMathModeFast;
  }
  return self;
}
- (void)setFastMathEnabled:(BOOL)enabled {
  fastMathEnabled = enabled;
  mathMode = enabled ? MTLMathModeFast : MTLMathModeSafe;
}
- (void)setMathMode:(MTLMathMode)mode {
  mathMode = mode;
  fastMathEnabled = mode != MTLMathModeSafe;
}
- (void)dealloc {
  [preprocessorMacros release];
  [super dealloc];
}
- (id)copyWithZone:(NSZone*)zone {
  MTLCompileOptions* copy = [[MTLCompileOptions allocWithZone:zone] init];
  copy.preprocessorMacros = preprocessorMacros;
  copy.mathMode = mathMode;
  copy.mathFloatingPointFunctions = mathFloatingPointFunctions;
  copy.languageVersion = languageVersion;
  copy.preserveInvariance = preserveInvariance;
  return copy;
}
@end

@interface VMPSLibrary : NSObject <MTLLibrary> {
 @public
  std::vector<vmps_library*>* parts;  // one for each source: a metallib may be made of several
  std::map<std::string, vmps_library*>* kernels;
  NSString* name;
}
@end

@interface VMPSFunction : NSObject <MTLFunction> {
 @public
  VMPSLibrary* library;
  vmps_library* part;
  NSString* kernel_name;
  Constants* constants;
  NSString* name;
}
@end

@implementation VMPSFunction
@synthesize label = name;
- (id<MTLDevice>)device {
  return MTLCreateSystemDefaultDevice();
}
- (MTLFunctionType)functionType {
  return MTLFunctionTypeKernel;
}
- (NSString*)name {
  return kernel_name;
}
- (void)dealloc {
  [library release];
  [kernel_name release];
  [name release];
  delete constants;
  [super dealloc];
}
@end

@implementation VMPSLibrary
@synthesize label = name;
- (id<MTLDevice>)device {
  return MTLCreateSystemDefaultDevice();
}
- (NSArray*)functionNames {
  NSMutableArray* names = [NSMutableArray array];
  for (auto& kernel : *kernels) [names addObject:[NSString stringWithUTF8String:kernel.first.c_str()]];
  return names;
}
- (id<MTLFunction>)newFunctionWithName:(NSString*)function_name {
  return [self newFunctionWithName:function_name
                    constantValues:[[MTLFunctionConstantValues new] autorelease]
                             error:nil];
}
- (id<MTLFunction>)newFunctionWithName:(NSString*)function_name
                        constantValues:(MTLFunctionConstantValues*)values
                                 error:(NSError**)error {
  auto found = kernels->find(function_name.UTF8String);
  if (found == kernels->end()) {
    if (error)
      *error = vmps::metal_error(MTLLibraryErrorDomain, MTLLibraryErrorFunctionNotFound,
                                 "function " + std::string(function_name.UTF8String) + " was not found in the library");
    return nil;
  }
  VMPSFunction* function = [VMPSFunction new];
  function->library = [self retain];
  function->part = found->second;
  function->kernel_name = [function_name copy];
  function->constants = new Constants(*values->constants);
  return function;
}
- (void)dealloc {
  if (parts)
    for (auto* part : *parts) vmps_library_destroy(part);
  delete parts;
  delete kernels;
  [name release];
  [super dealloc];
}
@end

@implementation VMPSPipeline
- (id<MTLDevice>)device {
  return MTLCreateSystemDefaultDevice();
}
- (NSString*)label {
  return name;
}
- (NSUInteger)maxTotalThreadsPerThreadgroup {
  return max_threads;
}
- (NSUInteger)threadExecutionWidth {
  return VMPS_SIMD_WIDTH;
}
- (NSUInteger)staticThreadgroupMemoryLength {
  return vmps_kernel_static_threadgroup_memory(kernel);
}
- (void)dealloc {
  if (kernel) vmps_kernel_destroy(kernel);
  [name release];
  [super dealloc];
}
@end

@implementation MTLComputePipelineDescriptor
@synthesize label, computeFunction, threadGroupSizeIsMultipleOfThreadExecutionWidth, maxTotalThreadsPerThreadgroup;
- (void)dealloc {
  [label release];
  [computeFunction release];
  [super dealloc];
}
- (id)copyWithZone:(NSZone*)zone {
  MTLComputePipelineDescriptor* copy = [[MTLComputePipelineDescriptor allocWithZone:zone] init];
  copy.label = label;
  copy.computeFunction = computeFunction;
  copy.threadGroupSizeIsMultipleOfThreadExecutionWidth = threadGroupSizeIsMultipleOfThreadExecutionWidth;
  copy.maxTotalThreadsPerThreadgroup = maxTotalThreadsPerThreadgroup;
  return copy;
}
@end

namespace vmps {

NSError* metal_error(NSString* domain, NSInteger code, const std::string& message) {
  NSString* text = [NSString stringWithUTF8String:message.c_str()];
  return [NSError errorWithDomain:domain
                             code:code
                         userInfo:[NSDictionary dictionaryWithObject:text forKey:NSLocalizedDescriptionKey]];
}

std::string take_error(char* message) {
  std::string text = message ? message : "unknown error";
  vmps_free(message);
  return text;
}

id<MTLLibrary> library_from_sources(const std::vector<std::string>& sources,
                                    const vmps_compile_options& options,
                                    NSError** error) {
  VMPSLibrary* library = [VMPSLibrary new];
  library->parts = new std::vector<vmps_library*>;
  library->kernels = new std::map<std::string, vmps_library*>;
  for (auto& source : sources) {
    char* message = nullptr;
    vmps_library* part = vmps_library_create(source.data(), source.size(), &options, &message);
    if (!part) {
      std::string text = take_error(message);
      if (error) *error = metal_error(MTLLibraryErrorDomain, MTLLibraryErrorCompileFailure, text);
      [library release];
      return nil;
    }
    library->parts->push_back(part);
    NSData* json = [NSData dataWithBytes:vmps_library_table(part) length:strlen(vmps_library_table(part))];
    NSDictionary* table = [NSJSONSerialization JSONObjectWithData:json options:0 error:nil];
    for (NSString* name in [table objectForKey:@"kernels"]) library->kernels->emplace(name.UTF8String, part);
  }
  return library;
}

id<MTLLibrary> library_from_metallib(const std::string& bytes, NSError** error) {
  std::vector<std::string> sources;
  bool readable = bytes.compare(0, kMetallibMagic.size(), kMetallibMagic) == 0;
  for (size_t at = kMetallibMagic.size(); readable && at < bytes.size();) {
    const size_t line_end = bytes.find('\n', at);
    const size_t length = std::strtoull(bytes.c_str() + at, nullptr, 10);
    readable = line_end != std::string::npos && length <= bytes.size() - line_end - 1;
    if (readable) sources.push_back(bytes.substr(line_end + 1, length));
    at = line_end + 1 + length;
  }
  if (!readable) {
    if (error)
      *error =
          metal_error(MTLLibraryErrorDomain, MTLLibraryErrorUnsupported,
                      "This is no metallib of virtual_mps. A metallib that Apple's tools made holds code for Apple "
                      "GPUs, which cannot run here: build it with the xcrun of this package.");
    return nil;
  }
  vmps_compile_options options{};
  options.preprocessed = 1;
  return library_from_sources(sources, options, error);
}

id<MTLComputePipelineState> pipeline_for(id<MTLFunction> function,
                                         NSUInteger max_threads,
                                         NSString* label,
                                         NSError** error) {
  auto* from = (VMPSFunction*)function;
  if (!from) {
    if (error) *error = metal_error(@"AGXMetal", 3, "computeFunction must not be nil.");
    return nil;
  }
  const auto constants = from->constants->list();
  char* message = nullptr;
  vmps_kernel* kernel =
      vmps_kernel_create(from->part, from->kernel_name.UTF8String, constants.data(), constants.size(), &message);
  if (!kernel) {
    std::string text = take_error(message);
    if (error) *error = metal_error(MTLLibraryErrorDomain, MTLLibraryErrorCompileFailure, text);
    return nil;
  }
  VMPSPipeline* pipeline = [VMPSPipeline new];
  pipeline->kernel = kernel;
  pipeline->max_threads = vmps_kernel_max_threads(kernel);
  if (max_threads && max_threads < pipeline->max_threads) pipeline->max_threads = max_threads;
  pipeline->parameter_count = vmps_kernel_parameters(kernel, &pipeline->parameters);
  pipeline->name = [label copy];
  return pipeline;
}

}  // namespace vmps
