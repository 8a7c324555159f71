// See run_options.h.
#include "tools/run_options.h"

#include <limits>

#include "tools/option_checks.h"

namespace argosy::tools {

void add_layer_options(CLI::App& command, RunOptions& options) {
  command.add_option("--model", options.model, "Checkpoint folder in Hugging Face format")
      ->required()
      ->type_name("DIR")
      ->check(not_empty());
  command.add_option("--layer", options.layer, "Layer of the model, counted from 0")
      ->required()
      ->type_name("N")
      ->check(whole_number(0, std::numeric_limits<int32_t>::max()));
  command
      .add_option("--input", options.input,
                  "Hidden states [tokens, hidden] to run on, fp32 or bf16")
      ->required()
      ->type_name("FILE:TENSOR")
      ->check(file_and("TENSOR"));
  command
      .add_option(
          "--router", options.router,
          "Routing rules by hand (docs/routing.md), in place of the model's own; may name the "
          "family of an unknown model (default: none)")
      ->type_name("FILE")
      ->check(not_empty());
  command
      .add_option("--nan-scales", options.nan_scales,
                  "What a NaN scale of quantised experts makes: NaN of its block, or an error that "
                  "names it (default: nan)")
      ->type_name("nan|error")
      ->check(one_of({"nan", "error"}));
  command
      .add_option("--ranks", options.ranks,
                  "Ranks, 1 to 64 (default: 1; under a launcher, the size it gives)")
      ->type_name("R")
      ->check(whole_number(1, 64));
  command
      .add_option("--transport", options.transport,
                  "inproc: ranks are threads of this process; shm: processes, started by this one "
                  "or by a launcher (default: shm under a launcher, else inproc)")
      ->type_name("inproc|shm")
      ->check(one_of({"inproc", "shm"}));
  command
      .add_option("--threads-per-rank", options.threads_per_rank,
                  "Threads of every rank, 1 to 1024, at most 1024 of all ranks (default: 1)")
      ->type_name("T")
      ->check(whole_number(1, 1024));
  command
      .add_option(
          "--pin", options.pin,
          "Bind threads to cores, rank after rank: auto (when each thread has a core of its "
          "own), on, off (default: auto)")
      ->type_name("auto|on|off")
      ->check(one_of({"auto", "on", "off"}));
  command
      .add_option("--dot-order", options.dot_order,
                  "Order of bf16 dot products: auto, amx, vdpbf16 (default: auto)")
      ->type_name("ORDER")
      ->check(dot_order_name());
  command
      .add_option("--level", options.level,
                  "CPU level, for example generic (default: the best there is)")
      ->type_name("LEVEL")
      ->check(level_name());
  command
      .add_option("--receive-budget", options.receive_budget,
                  "Bytes of a rank's receive buffer; more runs in rounds (default: 268435456)")
      ->type_name("BYTES")
      ->check(whole_number(1, std::numeric_limits<int64_t>::max()));
  command
      .add_option("--mode", options.mode,
                  "How rows travel: throughput (counts first), latency (into fixed slots without "
                  "asking), auto (whichever was measured to be faster) (default: throughput)")
      ->type_name("throughput|latency|auto")
      ->check(one_of({"throughput", "latency", "auto"}));
  command
      .add_option("--payload", options.payload,
                  "Format of dispatched rows; bf16: as they are (default: bf16)")
      ->type_name("bf16|fp8_128|fp8_128_e8m0|mxfp8")
      ->check(one_of({"bf16", "fp8_128", "fp8_128_e8m0", "mxfp8"}));
  command
      .add_option("--max-tokens", options.max_tokens,
                  "Latency mode: the most tokens of one rank in a call (default: as many as a rank "
                  "has)")
      ->type_name("M")
      ->check(whole_number(1, 1 << 20));
  command.add_flag("--chunk", options.chunk,
                   "Latency mode: bring more than --max-tokens tokens in several calls");
  command.add_flag("--weights-inside", options.weights_inside,
                   "Multiply routed weights into the activation, not at combine; throughput mode");
  command
      .add_option("--dtype", options.dtype,
                  "Convert the input to this dtype before the run (default: as the file has it)")
      ->type_name("fp32|bf16")
      ->check(one_of({"fp32", "bf16"}));
  CLI::Option* const backward =
      command.add_flag("--backward", options.backward,
                       "Run the layer backward too, for the output's gradient of --grad-output");
  CLI::Option* const grad_output =
      command
          .add_option(
              "--grad-output", options.grad_output,
              "Gradient of the output [tokens, hidden], fp32 or bf16; rounded to the input's "
              "dtype")
          ->type_name("FILE:TENSOR")
          ->check(file_and("TENSOR"))
          ->needs(backward);
  backward->needs(grad_output);
  command
      .add_option("--recipe", options.recipe,
                  "Number format of the experts' products, forward and backward; bf16: operands as "
                  "they are (default: bf16)")
      ->type_name("bf16|mxfp8|mxfp8_ceil")
      ->check(one_of({"bf16", "mxfp8", "mxfp8_ceil"}))
      ->needs(backward);
  command
      .add_option("--timeout", options.timeout_seconds,
                  "Seconds to wait for other ranks, at start and in every step; fractions are fine "
                  "(default: 60 and 30)")
      ->type_name("SECONDS")
      ->check(number(0.001, 1e6));
  command
      .add_option(
          "--simulate", options.simulate,
          "Trouble on purpose, for example seed=7,delay_us=200,pause_us=50 or kill=1@12; all "
          "words: docs/failures.md (default: none)")
      ->type_name("WORDS");
  command
      .add_option("--repeat", options.repeat,
                  "Runs on the same group; times are medians (default: 1)")
      ->type_name("N")
      ->check(whole_number(1, 1'000'000));
}

void add_result_options(CLI::App& command, RunOptions& options) {
  command
      .add_option("--check", options.check,
                  "Tokens to hold against the fp64 reference, evenly spread: a number, all or none "
                  "(default: 64)")
      ->type_name("N|all|none")
      ->check(check_count());
  command
      .add_option("--compare", options.compare,
                  "Hold routing and output against captures PREFIX.router_logits, .topk_idx, "
                  ".topk_weights, .moe_output (default: none)")
      ->type_name("FILE:PREFIX")
      ->check(file_and("PREFIX"));
  command
      .add_option(
          "--tolerance", options.tolerance,
          "Allowed error of the output, as a part of its peak (default: 1e-5 for fp32, 2e-2 "
          "for bf16)")
      ->type_name("X")
      ->check(number(0, std::numeric_limits<double>::max()));
  command
      .add_option("--floors", options.floors,
                  "Put the least time that this machine allows beside every stage; measures it for "
                  "about 0.1 s after the run: on, off (default: on)")
      ->type_name("on|off")
      ->check(one_of({"on", "off"}));
  command
      .add_option("--output", options.output,
                  "Write output, topk_idx and topk_weights to this safetensors file")
      ->type_name("FILE")
      ->check(not_empty());
  CLI::Option* const backward = command.get_option("--backward");
  command
      .add_option("--grads", options.grads,
                  "Write d.hidden and the gradients of the layer's tensors, d. and their names, to "
                  "this safetensors file")
      ->type_name("FILE")
      ->check(not_empty())
      ->needs(backward);
  command
      .add_option(
          "--compare-grads", options.compare_grads,
          "Hold every gradient against the tensor of the same name in this safetensors file")
      ->type_name("FILE")
      ->check(not_empty())
      ->needs(backward);
  command
      .add_option("--json", options.json, "Write JSON to this file; - is stdout, without the table")
      ->type_name("FILE|-")
      ->check(not_empty());
  command
      .add_option("--report", options.report,
                  "Write a page (HTML, one file) with load, traffic, time line and every figure")
      ->type_name("FILE")
      ->check(not_empty());
  command
      .add_option("--trace", options.trace,
                  "Write the time line of the last run as trace events, for Perfetto or "
                  "chrome://tracing")
      ->type_name("FILE")
      ->check(not_empty());
  command
      .add_option("--record-routing", options.record_routing,
                  "Write which experts the tokens of every rank went to: a router trace, .npz or "
                  ".jsonl")
      ->type_name("FILE")
      ->check(not_empty());
}

}  // namespace argosy::tools
