// The types of MPS that PyTorch's headers name. Only MPSCommandBuffer can be used: MPS's own kernels are not here.
#pragma once
#import <Metal/Metal.h>

typedef NS_ENUM(uint32_t, MPSDataType) {
  MPSDataTypeInvalid = 0,
  MPSDataTypeFloatBit = 0x10000000,
  MPSDataTypeComplexBit = 0x01000000,
  MPSDataTypeFloat32 = MPSDataTypeFloatBit | 32,
  MPSDataTypeFloat16 = MPSDataTypeFloatBit | 16,
  MPSDataTypeSignedBit = 0x20000000,
  MPSDataTypeInt8 = MPSDataTypeSignedBit | 8,
  MPSDataTypeInt16 = MPSDataTypeSignedBit | 16,
  MPSDataTypeInt32 = MPSDataTypeSignedBit | 32,
  MPSDataTypeInt64 = MPSDataTypeSignedBit | 64,
  MPSDataTypeUInt8 = 8,
  MPSDataTypeUInt16 = 16,
  MPSDataTypeUInt32 = 32,
  MPSDataTypeUInt64 = 64,
  MPSDataTypeAlternateEncodingBit = 0x80000000,
  MPSDataTypeBool = MPSDataTypeAlternateEncodingBit | 8,
  MPSDataTypeBFloat16 = MPSDataTypeAlternateEncodingBit | MPSDataTypeFloat16,
};

typedef NSArray MPSShape;

@interface MPSCommandBuffer : NSObject <MTLCommandBuffer>
@property(readonly, nonnull, nonatomic, retain) id<MTLCommandBuffer> commandBuffer;
@property(readonly, nonnull, nonatomic, retain) id<MTLCommandBuffer> rootCommandBuffer;
+ (nonnull instancetype)commandBufferFromCommandQueue:(nonnull id<MTLCommandQueue>)commandQueue;
+ (nonnull instancetype)commandBufferWithCommandBuffer:(nonnull id<MTLCommandBuffer>)commandBuffer;
- (nonnull instancetype)initWithCommandBuffer:(nonnull id<MTLCommandBuffer>)commandBuffer;
- (void)commitAndContinue;
@end

@interface MPSKernel : NSObject
@end

@interface MPSNDArray : NSObject
@end
