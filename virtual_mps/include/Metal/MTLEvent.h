#pragma once
#import <Foundation/Foundation.h>
#include <dispatch/dispatch.h>

@protocol MTLDevice
, MTLSharedEvent;
@class MTLSharedEventListener;

typedef void (^MTLSharedEventNotificationBlock)(id<MTLSharedEvent> _Nonnull event, uint64_t value);

@protocol MTLEvent <NSObject>
@property(nullable, copy, atomic) NSString* label;
@property(nullable, readonly) id<MTLDevice> device;
@end

@protocol MTLSharedEvent <MTLEvent>
@property(readwrite) uint64_t signaledValue;
@end
