// Enough of CoreFoundation to read a property of the IO registry, which is how Metal code asks for the GPU's core
// count.
#pragma once
#import <Foundation/Foundation.h>

typedef const void* CFTypeRef;
typedef const struct __CFString* CFStringRef;
typedef const struct __CFNumber* CFNumberRef;
typedef const struct __CFAllocator* CFAllocatorRef;
typedef const struct __CFDictionary* CFDictionaryRef;
typedef struct __CFDictionary* CFMutableDictionaryRef;
typedef unsigned long CFTypeID;
typedef signed long CFIndex;
typedef CFIndex CFNumberType;
typedef unsigned char Boolean;
typedef double CFTimeInterval;

enum { kCFNumberIntType = 9 };
#define kCFAllocatorDefault ((CFAllocatorRef)0)
#define CFSTR(s) ((__bridge CFStringRef)(@s))

#ifdef __cplusplus
extern "C" {
#endif
CFTypeID CFGetTypeID(CFTypeRef object);
CFTypeID CFNumberGetTypeID(void);
Boolean CFNumberGetValue(CFNumberRef number, CFNumberType type, void* value);
CFTypeRef CFRetain(CFTypeRef object);
void CFRelease(CFTypeRef object);
#ifdef __cplusplus
}
#endif
