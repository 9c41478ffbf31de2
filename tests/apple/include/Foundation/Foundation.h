// The part of Foundation that csrc, PyTorch's headers and the stand-in's Metal headers use, in Apple's terms: GNUstep's
// headers, which the Linux build has, do not compile for a Mac. Declarations only, held against Apple's own metadata by
// test_headers.py like the Metal headers are.
#pragma once
#include <TargetConditionals.h>
#include <dispatch/dispatch.h>
#include <objc/NSObjCRuntime.h>
#include <objc/NSObject.h>
#include <objc/objc.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define NS_ENUM(type, name) \
  enum name : type name;    \
  enum name : type
#define NS_OPTIONS(type, name) \
  enum name : type name;       \
  enum name : type
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

@class NSData, NSError, NSNumber, NSString, NSURL;

typedef double NSTimeInterval;
typedef struct _NSRange {
  NSUInteger location;
  NSUInteger length;
} NSRange;

static inline NSRange NSMakeRange(NSUInteger location, NSUInteger length) {
  NSRange range = {location, length};
  return range;
}

typedef NSUInteger NSStringEncoding;
enum : NSStringEncoding { NSASCIIStringEncoding = 1, NSUTF8StringEncoding = 4 };

typedef struct _NSZone NSZone;
@protocol NSCopying
- (nonnull id)copyWithZone:(nullable NSZone*)zone;
@end

@interface NSArray<__covariant Object> : NSObject <NSCopying>
@property(readonly) NSUInteger count;
- (nonnull Object)objectAtIndex:(NSUInteger)index;
@end

@interface NSDictionary<__covariant Key, __covariant Object> : NSObject <NSCopying>
@property(readonly) NSUInteger count;
- (nullable Object)objectForKey:(nonnull Key)key;
@end

@interface NSString : NSObject <NSCopying>
@property(readonly) NSUInteger length;
@property(nullable, readonly) const char* UTF8String __attribute__((objc_returns_inner_pointer));
+ (nullable instancetype)stringWithUTF8String:(nonnull const char*)text;
+ (nullable instancetype)stringWithContentsOfFile:(nonnull NSString*)path
                                         encoding:(NSStringEncoding)encoding
                                            error:(NSError* _Nullable* _Nullable)error;
@end

@interface NSNumber : NSObject
@property(readonly) NSUInteger unsignedIntegerValue;
+ (nonnull NSNumber*)numberWithUnsignedInteger:(NSUInteger)value;
@end

@interface NSError : NSObject <NSCopying>
@property(readonly) NSInteger code;
@property(nonnull, readonly, copy) NSString* domain;
@property(nonnull, readonly, copy) NSString* localizedDescription;
@end

@interface NSURL : NSObject <NSCopying>
+ (nonnull NSURL*)fileURLWithPath:(nonnull NSString*)path;
@end

@interface NSFileManager : NSObject
@property(class, nonnull, readonly, strong) NSFileManager* defaultManager;
- (BOOL)fileExistsAtPath:(nonnull NSString*)path;
@end
