// A RouterSpec by hand: a small JSON file, and single fields by their names.
//
//   {"preset": "deepseek_v3", "num_experts": 64, "top_k": 6, "normalise": false,
//    "family": "deepseek_v3"}
//
// Keys are the fields of RouterSpec, all optional, and:
//   preset   fills every field first; the others override it
//   family   under whose config fields and tensor names a checkpoint is read whose own model_type
//            is unknown (or another); only for files that go with a checkpoint
// Nothing else is accepted. docs/routing.md has the words of every field. Test:
// tests/io/router_file_test.cc, tests/router/spec_test.cc.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "argosy/router.h"
#include "argosy/status.h"

namespace argosy {

struct RouterFile {
  std::string family;  // empty: the checkpoint's own
  // As the file says, not validated: what it leaves out is as in RouterSpec{} or in the preset, so
  // sizes may be 0 until the caller fills them.
  RouterSpec spec;
};

// Errors of both: kCorruptData for what is no JSON object; kInvalidArgument naming the field and
// the value for an unknown field, a wrong type or a value that is none of the field's; kNotFound
// for an unknown preset. Of the file: also kNotFound, kIo.
Result<RouterFile> parse_router_file(std::string_view json_text);
Result<RouterFile> read_router_file(const std::string& path);

// The names of the fields of RouterSpec, as to_string() prints them and in its order.
const std::vector<std::string>& router_field_names();

// Sets one field from text: a decimal number, or a word as to_string() prints it (for yes and no
// also true and false). Errors: kNotFound lists the fields; kInvalidArgument names field, value and
// what is allowed. *spec is not validated, and unchanged after an error.
Status set_router_field(std::string_view field, std::string_view value, RouterSpec* spec);

}  // namespace argosy
