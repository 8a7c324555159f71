// JSON text as a run of events, for bytes that nobody vouches for.
//
// The only memory it asks for is one decoded text at a time, never longer than the text it stands
// in: what a reader keeps is its handler's choice. Strict RFC 8259 and UTF-8; a byte order mark at
// the front is passed over. Test: tests/io/json_reader_test.cc.
#pragma once

#include <cstdint>
#include <string_view>

#include "argosy/status.h"

namespace argosy::io {

inline constexpr int kMaxJsonDepth = 64;

// Takes the events in the order of the text. A Status that is not ok ends the reading. Views hold
// until the call returns.
class JsonHandler {
 public:
  virtual ~JsonHandler() = default;

  virtual Status null() = 0;
  virtual Status boolean(bool value) = 0;
  // An integer is one without fraction and exponent that fits; any other number is a number_float,
  // with the text that it stands as.
  virtual Status number_unsigned(uint64_t value) = 0;
  virtual Status number_negative(int64_t value) = 0;  // also -0
  virtual Status number_float(double value, std::string_view text) = 0;
  virtual Status string(std::string_view value) = 0;
  virtual Status start_object() = 0;
  virtual Status key(std::string_view word) = 0;  // may stand twice: for the handler to refuse
  virtual Status end_object() = 0;
  virtual Status start_array() = 0;
  virtual Status end_array() = 0;
};

// Reads one value and the end of the text. Errors: those of the handler; kCorruptData "<subject> no
// JSON at byte <n>", n counted from 1 to the byte that does not fit, also for a number that fp64
// cannot hold; kCorruptData "<subject> nested deeper than <limit>".
Status read_json(std::string_view text, std::string_view subject, JsonHandler& handler);

}  // namespace argosy::io
