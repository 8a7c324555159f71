// Which mode is faster for how many tokens, by measuring both.
//
// Test: tests/moe/latency_layer_test.cc.
#pragma once

#include <cstdint>

#include "argosy/exchange.h"
#include "argosy/group.h"
#include "argosy/latency.h"
#include "argosy/status.h"

namespace argosy {

// The most tokens of a rank for which dispatch and combine in latency mode take no longer than in throughput mode, the
// slowest rank counting; 0 when throughput mode is faster already for one. Tries 1, 2, 4, ... up to max_tokens, stops where
// latency mode loses, or after half a second. The same number on every rank. Kept: a second call for the same group and shape measures nothing.
//
// Collective: yes; no call may be in flight on either. Blocks: at most step_deadline a step. Errors: those of the exchanges.
Result<int64_t> find_crossover(Group& group, Exchange& throughput, LatencyExchange& latency);

}  // namespace argosy
