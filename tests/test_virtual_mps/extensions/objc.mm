// Modern Objective-C, compiled with ARC: classes, properties, categories, protocols, literals, subscripts, blocks as
// objects, weak references, exceptions of both languages. Nothing here knows where it runs.
#import <Foundation/Foundation.h>
#import <Metal/Metal.h>
#include <torch/library.h>

#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <unordered_map>

static int deallocated = 0;

@protocol Sized <NSObject>
- (NSUInteger)size;
@optional
- (NSUInteger)notImplemented;
@end

@interface Holder : NSObject <Sized>
@property(nonatomic, strong) NSString* text;
@property(nonatomic) int number;
@property(nonatomic, weak) Holder* other;
@property(atomic, copy) NSString* copied;
@end

@implementation Holder {
  std::string _cxx;
  NSMutableArray* _private;
}
- (instancetype)init {
  if ((self = [super init])) {
    _cxx = "a C++ member that is long enough to live on the heap";
    _private = [NSMutableArray array];
  }
  return self;
}
- (NSUInteger)size {
  return _cxx.size() + _private.count;
}
- (void)dealloc {
  deallocated++;
}
@end

@interface Derived : Holder
@property(nonatomic) double fraction;
@property(nonatomic, copy) int (^handler)(int);
@end
@implementation Derived
@end

@interface Bare : Holder  // no instance variables of its own
@end
@implementation Bare
@end

@interface NSString (Twice)
- (NSString*)twice;
@end
@implementation NSString (Twice)
- (NSString*)twice {
  return [self stringByAppendingString:self];
}
@end

struct Cache {
  std::unordered_map<std::string, id<MTLBuffer>> buffers;
  NSString* name;
};

namespace {

std::map<std::string, std::function<std::string()>> scenes() {
  return {
      {"literals",
       [] {
         NSArray<NSString*>* array = @[ @"p", @"q" ];
         NSDictionary* dictionary = @{@"k" : @(7), @"f" : @2.5};
         NSMutableDictionary* changed = [NSMutableDictionary dictionary];
         changed[@"x"] = array;
         return [NSString stringWithFormat:@"%@ %@ %@ %lu", array[1], dictionary[@"k"], dictionary[@"f"],
                                           (unsigned long)[changed[@"x"] count]]
             .UTF8String;
       }},
      {"classes",
       [] {
         Derived* object = [Derived new];
         object.text = @"t";
         object.number = 4;
         object.fraction = 2.5;
         object.copied = [NSMutableString stringWithString:@"copy"];
         Holder* same = object;
         return std::to_string(same.number) + same.text.UTF8String + std::to_string(object.fraction).substr(0, 3) +
                std::to_string([same size]) + object.copied.UTF8String + std::to_string([[Bare new] size]);
       }},
      {"protocols",
       [] {
         id<Sized> object = [Derived new];
         return std::to_string([object conformsToProtocol:@protocol(Sized)]) +
                std::to_string([object respondsToSelector:@selector(size)]) +
                std::to_string([object respondsToSelector:@selector(notImplemented)]) +
                std::to_string([@"x" conformsToProtocol:@protocol(Sized)]);
       }},
      {"categories", [] { return std::string([@"ab" twice].UTF8String); }},
      {"deallocation",
       [] {
         const int before = deallocated;
         @autoreleasepool {
           NSArray* kept = @[ [Derived new], [Holder new] ];
           Holder* third = [Bare new];
           third.other = kept[1];
         }
         return std::to_string(deallocated - before);
       }},
      {"weak_references",
       [] {
         __weak Holder* weak;
         bool alive, same;
         @autoreleasepool {
           Holder* strong = [Holder new];
           weak = strong;
           Holder* other = [Holder new];
           other.other = strong;
           alive = weak != nil;
           same = other.other == strong;
         }
         return std::to_string(alive) + std::to_string(same) + std::to_string(weak == nil);
       }},
      {"blocks",
       [] {
         Derived* object = [Derived new];
         int base = 10;
         __block int sum = 0;
         NSString* captured = [@"cap" twice];
         object.handler = ^(int value) {
           sum += base + value + int(captured.length);
           return sum;
         };
         object.handler(1);
         const int second = object.handler(2);
         NSMutableArray* blocks = [NSMutableArray array];
         for (int i = 0; i < 3; i++)
           [blocks addObject:^{
             return i * 10;
           }];
         int total = 0;
         for (int (^block)(void) in blocks) total += block();
         id last = blocks[2];
         return std::to_string(second) + " " + std::to_string(total) + " " +
                std::to_string([last isKindOfClass:[NSObject class]]);
       }},
      {"cxx_containers",
       [] {
         Cache cache;
         @autoreleasepool {
           cache.buffers["x"] = [MTLCreateSystemDefaultDevice() newBufferWithLength:64 options:0];
           cache.name = [NSString stringWithUTF8String:"/a/b/c.so"].stringByDeletingLastPathComponent;
         }
         return std::to_string(cache.buffers["x"].length) + cache.name.UTF8String;
       }},
      {"cxx_exceptions",
       [] {
         std::string caught;
         Holder* guarded = [Holder new];
         try {
           @autoreleasepool {
             void (^block)(void) = ^{
               if (guarded.number == 0) throw std::runtime_error("through a block");
             };
             block();
           }
         } catch (const std::exception& error) {
           caught = error.what();
         }
         return caught;
       }},
      {"objc_exceptions",
       [] {
         std::string log;
         @try {
           [NSException raise:NSInvalidArgumentException format:@"value %d", 3];
         } @catch (NSString*) {
           log += "wrong ";
         } @catch (NSException* exception) {
           log += exception.reason.UTF8String;
         } @finally {
           log += " finally";
         } @
         try {
           @throw @"a string";
         } @catch (id object) {
           log += [NSString stringWithFormat:@" %@", object].UTF8String;
         } @
         try {
           throw std::runtime_error("C++");
         } @catch (NSException*) {
           log += " wrong";
         } @catch (...) {
           log += " any";
         }
         return log;
       }},
      {"unrecognised_selector",
       [] {
         id object = [Holder new];
         return std::string([object lowercaseString].UTF8String);
       }},
      {"array_out_of_bounds",
       [] {
         NSArray* array = @[ @1 ];
         return std::to_string([array[5] intValue]);
       }},
      {"enumeration",
       [] {
         __block std::string keys;
         [@[ @"a", @"b", @"c" ] enumerateObjectsUsingBlock:^(id object, NSUInteger index, BOOL* stop) {
           keys += [object UTF8String];
           *stop = index == 1;
         }];
         return keys;
       }},
  };
}

}  // namespace

TORCH_LIBRARY(objc, m) {
  m.def("run(str name) -> str", [](std::string name) { return scenes().at(name)(); });
}
