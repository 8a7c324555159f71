// The zip container (PKWARE APPNOTE 6.3.9: stored and deflated members, zip64). The members' own
// format is npy.cc. Test: tests/io/npz_test.cc.
#include "io/npz.h"

#include <fmt/ranges.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "io/json.h"
#include "io/npy.h"

namespace argosy::io {
namespace {

constexpr uint32_t kEndMark = 0x06054b50;
constexpr uint32_t kEnd64Mark = 0x06064b50;
constexpr uint32_t kEnd64PlaceMark = 0x07064b50;
constexpr uint32_t kEntryMark = 0x02014b50;
constexpr uint32_t kLocalMark = 0x04034b50;
constexpr size_t kEndBytes = 22;
constexpr size_t kEnd64Bytes = 56;
constexpr size_t kEnd64PlaceBytes = 20;
constexpr size_t kEntryBytes = 46;
constexpr size_t kLocalBytes = 30;
constexpr size_t kMaxComment = 65535;
constexpr uint16_t kStored = 0;
constexpr uint16_t kDeflated = 8;
constexpr uint32_t kIn64 = 0xFFFFFFFF;  // "see the zip64 field"

// Precondition: in range.
template <typename T>
T number_at(std::string_view bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

template <typename T>
void put(T value, std::string* out) {
  out->append(reinterpret_cast<const char*>(&value), sizeof value);
}

Status corrupt(std::string_view what) {
  return base::error(StatusCode::kCorruptData, "npz: {}", what);
}

uint32_t crc_of(std::string_view bytes) {
  return static_cast<uint32_t>(
      ::crc32_z(0, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

struct Directory {
  uint64_t begin = 0;
  uint64_t bytes = 0;
  uint64_t members = 0;
};

// The zip64 end record, when the plain one points to it.
Result<Directory> find_directory_64(std::string_view bytes, size_t end_at) {
  if (end_at < kEnd64PlaceBytes) return corrupt("the zip64 end record is missing");
  const size_t place = end_at - kEnd64PlaceBytes;
  if (number_at<uint32_t>(bytes, place) != kEnd64PlaceMark) {
    return corrupt("the zip64 end record is missing");
  }
  const auto at = number_at<uint64_t>(bytes, place + 8);
  if (at > place || place - at < kEnd64Bytes || number_at<uint32_t>(bytes, at) != kEnd64Mark) {
    return corrupt("the zip64 end record is not where the archive says");
  }
  return Directory{number_at<uint64_t>(bytes, at + 48), number_at<uint64_t>(bytes, at + 40),
                   number_at<uint64_t>(bytes, at + 32)};
}

Result<Directory> find_directory(std::string_view bytes) {
  if (bytes.size() < kEndBytes) return corrupt("too short for a zip archive");
  const size_t last = bytes.size() - kEndBytes;
  const size_t first = last > kMaxComment ? last - kMaxComment : 0;
  for (size_t at = last + 1; at-- > first;) {
    if (number_at<uint32_t>(bytes, at) != kEndMark) continue;
    if (number_at<uint16_t>(bytes, at + 20) != last - at) continue;  // not a mark: inside a comment
    Directory directory{number_at<uint32_t>(bytes, at + 16), number_at<uint32_t>(bytes, at + 12),
                        number_at<uint16_t>(bytes, at + 10)};
    if (directory.begin == kIn64 || directory.bytes == kIn64 || directory.members == 0xFFFF) {
      ARGOSY_ASSIGN_OR_RETURN(directory, find_directory_64(bytes, at));
    }
    if (directory.begin > at || directory.bytes > at - directory.begin) {
      return corrupt(
          fmt::format("its directory of {} bytes at {} leaves the {} bytes before its end",
                      directory.bytes, directory.begin, at));
    }
    return directory;
  }
  return corrupt("no end of a zip archive");
}

// Numbers that do not fit 32 bits stand in the extra field, in this order.
Status apply_zip64(std::string_view extra, std::array<uint64_t*, 3> fields) {
  const bool any = std::any_of(fields.begin(), fields.end(),
                               [](const uint64_t* field) { return *field == kIn64; });
  if (!any) return {};
  while (extra.size() >= 4) {
    const auto kind = number_at<uint16_t>(extra, 0);
    const size_t bytes = number_at<uint16_t>(extra, 2);
    if (bytes > extra.size() - 4) break;
    std::string_view body = extra.substr(4, bytes);
    extra.remove_prefix(4 + bytes);
    if (kind != 1) continue;
    for (uint64_t* const field : fields) {
      if (*field != kIn64) continue;
      if (body.size() < 8) return corrupt("a zip64 field is cut short");
      *field = number_at<uint64_t>(body, 0);
      body.remove_prefix(8);
    }
    return {};
  }
  return corrupt("a zip64 field is missing");
}

// Output grows with what comes out, so that a size that the archive only claims is never allocated.
Result<std::string> inflate_all(std::string_view stored, uint64_t bytes, std::string_view name) {
  z_stream stream{};
  if (::inflateInit2(&stream, -MAX_WBITS) != Z_OK) {
    return base::error(StatusCode::kOutOfMemory, "npz: no memory to inflate {}", in_quotes(name));
  }
  constexpr size_t kChunk = size_t{1} << 15;
  std::string out;
  int state = Z_OK;
  size_t taken = 0;
  while (state == Z_OK && out.size() <= bytes) {
    const size_t before = out.size();
    out.resize(before + kChunk);
    const size_t give = std::min(stored.size() - taken, size_t{1} << 30);
    stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(stored.data() + taken));
    stream.avail_in = static_cast<uInt>(give);
    stream.next_out = reinterpret_cast<Bytef*>(out.data() + before);
    stream.avail_out = kChunk;
    state = ::inflate(&stream, Z_NO_FLUSH);
    taken += give - stream.avail_in;
    out.resize(before + kChunk - stream.avail_out);
    if (state == Z_OK && out.size() == before && taken == stored.size()) break;
  }
  ::inflateEnd(&stream);
  if (state != Z_STREAM_END || out.size() != bytes) {
    return corrupt(fmt::format("array {} does not inflate to the {} bytes that it claims",
                               in_quotes(name), bytes));
  }
  return out;
}

// Entry of the directory and header of the member share most fields.
void put_fields(std::string_view body, uint32_t crc, size_t name_bytes, std::string* out) {
  put<uint16_t>(0, out);                        // flags
  put<uint16_t>(kStored, out);                  // method
  put<uint16_t>(0, out);                        // time 00:00
  put<uint16_t>((0 << 9) | (1 << 5) | 1, out);  // 1980-01-01: the same arrays, the same bytes
  put<uint32_t>(crc, out);
  put<uint32_t>(static_cast<uint32_t>(body.size()), out);
  put<uint32_t>(static_cast<uint32_t>(body.size()), out);
  put<uint16_t>(static_cast<uint16_t>(name_bytes), out);
  put<uint16_t>(0, out);  // extra
}

}  // namespace

Status NpzReader::add_member(std::string_view entry, size_t* entry_bytes) {
  if (entry.size() < kEntryBytes || number_at<uint32_t>(entry, 0) != kEntryMark) {
    return corrupt("an entry of its directory is cut short");
  }
  const size_t name_bytes = number_at<uint16_t>(entry, 28);
  const size_t extra_bytes = number_at<uint16_t>(entry, 30);
  *entry_bytes = kEntryBytes + name_bytes + extra_bytes + number_at<uint16_t>(entry, 32);
  if (*entry_bytes > entry.size()) return corrupt("an entry of its directory is cut short");
  if ((number_at<uint16_t>(entry, 8) & 1) != 0) {
    return base::error(StatusCode::kUnsupported, "npz: an encrypted archive");
  }
  Member member;
  std::string_view name = entry.substr(kEntryBytes, name_bytes);
  if (name.ends_with(".npy")) name.remove_suffix(4);
  member.name = std::string(name);
  member.method = number_at<uint16_t>(entry, 10);
  member.crc = number_at<uint32_t>(entry, 16);
  member.stored_bytes = number_at<uint32_t>(entry, 20);
  member.bytes = number_at<uint32_t>(entry, 24);
  member.header_at = number_at<uint32_t>(entry, 42);
  ARGOSY_RETURN_IF_ERROR(apply_zip64(entry.substr(kEntryBytes + name_bytes, extra_bytes),
                                     {&member.bytes, &member.stored_bytes, &member.header_at}));
  if (find(member.name) != nullptr) {
    return corrupt(fmt::format("two arrays are named {}", in_quotes(ascii(member.name))));
  }
  members_.push_back(std::move(member));
  return {};
}

Result<NpzReader> NpzReader::open(std::string_view bytes) {
  ARGOSY_ASSIGN_OR_RETURN(const Directory directory, find_directory(bytes));
  constexpr uint64_t kMaxMembers = 1024;  // also bounds the search for names that stand twice
  if (directory.members > kMaxMembers) {
    return corrupt(fmt::format("{} arrays, at most {} are read", directory.members, kMaxMembers));
  }
  NpzReader reader;
  reader.bytes_ = bytes;
  std::string_view rest = bytes.substr(directory.begin, directory.bytes);
  for (uint64_t i = 0; i < directory.members; ++i) {
    size_t entry_bytes = 0;
    ARGOSY_RETURN_IF_ERROR(reader.add_member(rest, &entry_bytes));
    rest.remove_prefix(entry_bytes);
  }
  return reader;
}

const NpzReader::Member* NpzReader::find(std::string_view name) const {
  const auto at = std::find_if(members_.begin(), members_.end(),
                               [&](const Member& member) { return member.name == name; });
  return at == members_.end() ? nullptr : &*at;
}

Result<std::string_view> NpzReader::stored(const Member& member) const {
  const uint64_t total = bytes_.size();
  if (member.header_at > total || total - member.header_at < kLocalBytes ||
      number_at<uint32_t>(bytes_, member.header_at) != kLocalMark) {
    return corrupt(fmt::format("array {} does not begin where the archive says",
                               in_quotes(ascii(member.name))));
  }
  const uint64_t begin = member.header_at + kLocalBytes +
                         number_at<uint16_t>(bytes_, member.header_at + 26) +
                         number_at<uint16_t>(bytes_, member.header_at + 28);
  if (begin > total || member.stored_bytes > total - begin) {
    return corrupt(fmt::format("array {} of {} bytes leaves the file",
                               in_quotes(ascii(member.name)), member.stored_bytes));
  }
  return bytes_.substr(begin, member.stored_bytes);
}

Result<NpyArray> NpzReader::read(std::string_view name, int64_t max_bytes) const {
  const Member* member = find(name);
  if (member == nullptr) {
    std::vector<std::string> names;
    for (const Member& one : members_) names.push_back(printable(ascii(one.name)));
    return base::error(StatusCode::kNotFound, "npz: no array {}; there are: {}", name,
                       fmt::join(names, ", "));
  }
  if (member->method != kStored && member->method != kDeflated) {
    return base::error(StatusCode::kUnsupported,
                       "npz: array {} is compressed by method {}; stored (0) and deflated (8) are "
                       "read",
                       name, member->method);
  }
  if (member->bytes > static_cast<uint64_t>(max_bytes)) {
    return base::error(StatusCode::kUnsupported, "npz: array {} is {} bytes, at most {} are read",
                       name, member->bytes, max_bytes);
  }
  ARGOSY_ASSIGN_OR_RETURN(const std::string_view raw, stored(*member));
  if (member->method == kStored && member->bytes != raw.size()) {
    return corrupt(fmt::format("array {} is stored as {} bytes but claims {}", name, raw.size(),
                               member->bytes));
  }
  std::string inflated;
  if (member->method == kDeflated) {
    ARGOSY_ASSIGN_OR_RETURN(inflated, inflate_all(raw, member->bytes, name));
  }
  const std::string_view body = member->method == kDeflated ? std::string_view(inflated) : raw;
  if (crc_of(body) != member->crc) {
    return corrupt(fmt::format("array {} has CRC {:08x}, the archive says {:08x}", name,
                               crc_of(body), member->crc));
  }
  return parse_npy(name, body);
}

Result<std::string> make_npz(std::span<const NpySource> arrays) {
  std::string out;
  std::string directory;
  for (const NpySource& array : arrays) {
    ARGOSY_ASSIGN_OR_RETURN(const std::string header, npy_header(array));
    std::string body = header;
    body.append(reinterpret_cast<const char*>(array.data.data()), array.data.size());
    // Offsets and sizes here are 32 bits wide, and one value means something else.
    if (body.size() >= kIn64 || out.size() >= kIn64 - body.size() - directory.size() - 1024) {
      return base::error(StatusCode::kUnsupported,
                         "npz: array {} of {} bytes would end beyond 4 GiB", array.name,
                         body.size());
    }
    const std::string name = array.name + ".npy";
    const uint32_t crc = crc_of(body);
    const auto at = static_cast<uint32_t>(out.size());
    put(kLocalMark, &out);
    put<uint16_t>(20, &out);  // version needed
    put_fields(body, crc, name.size(), &out);
    out += name;
    out += body;
    put(kEntryMark, &directory);
    put<uint16_t>(20, &directory);  // made by
    put<uint16_t>(20, &directory);
    put_fields(body, crc, name.size(), &directory);
    directory.append(10, '\0');  // comment, disk, attributes
    put(at, &directory);
    directory += name;
  }
  const auto directory_at = static_cast<uint32_t>(out.size());
  out += directory;
  put(kEndMark, &out);
  put<uint32_t>(0, &out);  // disks
  put(static_cast<uint16_t>(arrays.size()), &out);
  put(static_cast<uint16_t>(arrays.size()), &out);
  put(static_cast<uint32_t>(directory.size()), &out);
  put(directory_at, &out);
  put<uint16_t>(0, &out);  // comment
  return out;
}

}  // namespace argosy::io
