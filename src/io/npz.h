// Arrays of an .npz file: a zip of .npy members, as numpy.savez and numpy.savez_compressed write it.
//
// Nothing that the bytes say is believed: every offset and size is checked against them, members are
// checked against their CRC, and what a member inflates to is bounded before it is. Deflate is
// zlib's. Test: tests/io/npz_test.cc.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "argosy/status.h"
#include "argosy/tensor.h"

namespace argosy::io {

struct NpyArray {
  std::string name;  // of the member, without ".npy"
  DType dtype = DType::kUnset;
  std::vector<int64_t> shape;
  std::string data;  // row-major, little endian

  int64_t num_elements() const;  // fits: the data holds them
};

// An opened archive: its directory only. `bytes` must outlive it.
class NpzReader {
 public:
  // Errors: kCorruptData; kUnsupported for an encrypted or split archive.
  static Result<NpzReader> open(std::string_view bytes);

  bool has(std::string_view name) const { return find(name) != nullptr; }
  // Errors: kNotFound listing the arrays; kCorruptData; kUnsupported for another compression, dtype,
  // byte order or Fortran order, and for an array above `max_bytes`.
  Result<NpyArray> read(std::string_view name, int64_t max_bytes) const;

 private:
  struct Member {
    std::string name;
    uint16_t method = 0;
    uint32_t crc = 0;
    uint64_t stored_bytes = 0;
    uint64_t bytes = 0;
    uint64_t header_at = 0;
  };

  const Member* find(std::string_view name) const;
  Status add_member(std::string_view entry, size_t* entry_bytes);
  Result<std::string_view> stored(const Member& member) const;

  std::string_view bytes_;
  std::vector<Member> members_;
};

// One array to write. data: dense, dtype of the npy kinds (integers and floats but F16, BF16, FP8).
struct NpySource {
  std::string name;
  DType dtype = DType::kUnset;
  std::vector<int64_t> shape;
  std::span<const std::byte> data;
};

// A stored archive; the same arrays give the same bytes. Errors: kUnsupported for 4 GiB or more.
Result<std::string> make_npz(std::span<const NpySource> arrays);

}  // namespace argosy::io
