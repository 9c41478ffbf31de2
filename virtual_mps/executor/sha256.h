// SHA-256 (FIPS 180-4), for names in the disk cache.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

namespace vmps {

// Lower-case hexadecimal digest. Hash of the parts with their lengths, so that no two lists of parts collide.
std::string sha256(std::initializer_list<std::string_view> parts);

}  // namespace vmps
