#import <CoreFoundation/CoreFoundation.h>

extern "C" {

CFTypeID CFNumberGetTypeID(void) { return 22; }  // Apple's value
CFTypeID CFGetTypeID(CFTypeRef object) { return [(id)object isKindOfClass:[NSNumber class]] ? CFNumberGetTypeID() : 0; }
CFTypeRef CFRetain(CFTypeRef object) { return [(id)object retain]; }
void CFRelease(CFTypeRef object) { [(id)object release]; }

Boolean CFNumberGetValue(CFNumberRef number, CFNumberType type, void* value) {
  if (type != kCFNumberIntType) return false;
  *static_cast<int*>(value) = [(NSNumber*)number intValue];
  return true;
}
}
