// One array in numpy's .npy format (versions 1 to 3): a header that is a Python literal, then the
// data. Test: tests/io/npz_test.cc.
#pragma once

#include <string>
#include <string_view>

#include "argosy/status.h"
#include "io/npz.h"

namespace argosy::io {

// Errors: kCorruptData; kUnsupported for another dtype, byte order or Fortran order.
Result<NpyArray> parse_npy(std::string_view name, std::string_view bytes);

// Magic, version and header, padded so that data would begin at a multiple of 64. Errors:
// kUnsupported for a dtype that numpy has not.
Result<std::string> npy_header(const NpySource& array);

// Bytes that are not ASCII as '?': names in an archive have no known encoding.
std::string ascii(std::string_view text);

}  // namespace argosy::io
