// quantization_config of a config.json: which of the layouts of docs/checkpoints.md, and where not.
// Test: tests/io/quantisation_config_test.cc.
#pragma once

#include <optional>

#include "argosy/checkpoint.h"
#include "io/config_fields.h"

namespace argosy::io {

// None when the config has no such field. Errors: kInvalidArgument for a missing or contradictory field,
// kUnsupported for a method, a format or a field that this build would ignore; each names field and value.
Result<std::optional<CheckpointQuantisation>> read_quantisation(const ConfigFields& fields);

}  // namespace argosy::io
