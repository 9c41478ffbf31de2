#pragma once
#import <Foundation/Foundation.h>

@protocol MTLDevice;

typedef NS_ENUM(NSUInteger, MTLPurgeableState) {
  MTLPurgeableStateKeepCurrent = 1,
  MTLPurgeableStateNonVolatile = 2,
  MTLPurgeableStateVolatile = 3,
  MTLPurgeableStateEmpty = 4,
};

typedef NS_ENUM(NSUInteger, MTLCPUCacheMode) {
  MTLCPUCacheModeDefaultCache = 0,
  MTLCPUCacheModeWriteCombined = 1,
};

typedef NS_ENUM(NSUInteger, MTLStorageMode) {
  MTLStorageModeShared = 0,
  MTLStorageModeManaged = 1,
  MTLStorageModePrivate = 2,
  MTLStorageModeMemoryless = 3,
};

typedef NS_ENUM(NSUInteger, MTLHazardTrackingMode) {
  MTLHazardTrackingModeDefault = 0,
  MTLHazardTrackingModeUntracked = 1,
  MTLHazardTrackingModeTracked = 2,
};

typedef NS_OPTIONS(NSUInteger, MTLResourceOptions) {
  MTLResourceCPUCacheModeDefaultCache = MTLCPUCacheModeDefaultCache << 0,
  MTLResourceCPUCacheModeWriteCombined = MTLCPUCacheModeWriteCombined << 0,
  MTLResourceStorageModeShared = MTLStorageModeShared << 4,
  MTLResourceStorageModeManaged = MTLStorageModeManaged << 4,
  MTLResourceStorageModePrivate = MTLStorageModePrivate << 4,
  MTLResourceHazardTrackingModeDefault = MTLHazardTrackingModeDefault << 8,
  MTLResourceHazardTrackingModeUntracked = MTLHazardTrackingModeUntracked << 8,
  MTLResourceHazardTrackingModeTracked = MTLHazardTrackingModeTracked << 8,
  MTLResourceOptionCPUCacheModeDefault = MTLResourceCPUCacheModeDefaultCache,
  MTLResourceOptionCPUCacheModeWriteCombined = MTLResourceCPUCacheModeWriteCombined,
};

@protocol MTLResource <NSObject>
@property(nullable, copy, atomic) NSString* label;
@property(nonnull, readonly) id<MTLDevice> device;
@property(readonly) MTLCPUCacheMode cpuCacheMode;
@property(readonly) MTLStorageMode storageMode;
@property(readonly) MTLHazardTrackingMode hazardTrackingMode;
@property(readonly) MTLResourceOptions resourceOptions;
@property(readonly) NSUInteger allocatedSize;
- (MTLPurgeableState)setPurgeableState:(MTLPurgeableState)state;
@end
