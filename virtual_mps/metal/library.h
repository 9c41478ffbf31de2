#pragma once
#import <Metal/Metal.h>

#include <string>
#include <vector>

#include "../executor/executor.h"

namespace vmps {

NSError* metal_error(NSString* domain, NSInteger code, const std::string& message);
std::string take_error(char* message);  // copies what the executor reported, and frees it

// A library from Metal sources, or from the bytes of a metallib that the `metallib` tool of this package wrote.
id<MTLLibrary> library_from_sources(const std::vector<std::string>& sources,
                                    const vmps_compile_options& options,
                                    NSError** error);
id<MTLLibrary> library_from_metallib(const std::string& bytes, NSError** error);
id<MTLComputePipelineState> pipeline_for(id<MTLFunction> function,
                                         NSUInteger max_threads,
                                         NSString* label,
                                         NSError** error);

}  // namespace vmps

@interface VMPSPipeline : NSObject <MTLComputePipelineState> {
 @public
  vmps_kernel* kernel;
  NSUInteger max_threads;
  const vmps_parameter* parameters;
  size_t parameter_count;
  NSString* name;
}
@end
