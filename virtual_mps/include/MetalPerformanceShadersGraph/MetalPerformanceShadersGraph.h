// The names that PyTorch's headers use. MPSGraph itself is not here: code that builds a graph does not compile.
#pragma once
#import <MetalPerformanceShaders/MetalPerformanceShaders.h>

@class MPSGraphTensorData, MPSGraphExecutionDescriptor, MPSGraphCompilationDescriptor, MPSGraphExecutable;

// PyTorch's headers keep graphs as NSObject and use tensors as dictionary keys, which needs the classes to be known.
@interface MPSGraph : NSObject
@end

@interface MPSGraphTensor : NSObject <NSCopying>
@end
