// argosy memory: what a training step of one layer holds by tape policy: predicted, held, and the peak of the process.
//
// One rank, random bf16 weights. Test: tests/cli/memory_test.cc.
#include <fmt/format.h>
#include <malloc.h>

#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "argosy/moe.h"
#include "tools/bench/layer_work.h"
#include "tools/bench/random_data.h"
#include "tools/commands.h"
#include "tools/console.h"
#include "tools/option_checks.h"

namespace argosy::tools {
namespace {

constexpr Keep kS = Keep::kSave, kR = Keep::kRecompute, kF = Keep::kFp8, kO = Keep::kOffload;
constexpr TapePolicy kPolicies[] = {{kS, kS, kS, kS}, {kS, kS, kR, kR}, {kS, kR, kR, kR},
                                    {kR, kR, kR, kR}, {kF, kF, kF, kF}, {kF, kR, kR, kR},
                                    {kO, kO, kO, kO}};

// A line of /proc/self/status, in bytes; 0 where there is none.
int64_t process_bytes(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(name)) return 1024 * std::atoll(line.c_str() + name.size());
  }
  return 0;
}

// The peak from now on.
void forget_peak() { std::ofstream("/proc/self/clear_refs") << "5"; }

struct Row {
  TapePolicy policy;
  TapeSize size;
  int64_t tape = 0;
  MoeMemory held;
  int64_t peak = 0;  // of the process, above what it had before the step

  int64_t predicted_bytes() const {
    return size.tape_bytes + size.forward_bytes + size.backward_bytes + size.exchange_bytes;
  }
  int64_t held_bytes() const {
    return tape + held.forward_bytes + held.backward_bytes + held.exchange_bytes;
  }
};

Result<Row> measure(const bench::LayerShape& shape, const TapePolicy& policy) {
  const int64_t t = shape.num_tokens, h = shape.hidden;
  GroupOptions one;
  ARGOSY_ASSIGN_OR_RETURN(one.inproc, InprocWorld::create(1));
  ARGOSY_ASSIGN_OR_RETURN(const std::unique_ptr<Group> group, Group::join(one));
  ARGOSY_ASSIGN_OR_RETURN(MoeWeights weights, bench::layer_weights(shape, 0, shape.num_experts));
  ARGOSY_ASSIGN_OR_RETURN(const RouterSpec router,
                          router_preset("mixtral", shape.num_experts, shape.top_k));
  MoeOptions options;
  options.hidden_dtype = DType::kBF16;
  options.training = true;
  options.receive_budget_bytes = t * shape.top_k * h * size_of(DType::kBF16);
  ARGOSY_ASSIGN_OR_RETURN(const std::unique_ptr<MoeLayer> layer,
                          MoeLayer::create(*group, router, std::move(weights), options));
  ARGOSY_ASSIGN_OR_RETURN(const Tensor hidden, bench::normal_tensor({t, h}, 1.0, 1));
  ARGOSY_ASSIGN_OR_RETURN(Tensor output, Tensor::zeros(DType::kBF16, {t, h}));
  ARGOSY_ASSIGN_OR_RETURN(Tensor d_hidden, Tensor::zeros(DType::kBF16, {t, h}));
  TapeShape call = layer->tape_shape();
  call.num_tokens = call.global_tokens = t;
  call.num_slots = t * shape.top_k;
  Row row;
  row.policy = policy;
  row.size = size_tape(policy, call);
  ARGOSY_ASSIGN_OR_RETURN(const AlignedBuffer arena,
                          AlignedBuffer::allocate(row.size.offload_bytes));
  MoeTape tape(policy);
  tape.set_offload({arena.data(), static_cast<size_t>(arena.size_bytes())});
  MoeGradients gradients;
  gradients.d_hidden = d_hidden.view();
  forget_peak();
  const int64_t before = process_bytes("VmRSS:");
  ARGOSY_RETURN_IF_ERROR(
      layer->forward_train(hidden.view(), nullptr, output.view(), &tape, nullptr));
  ARGOSY_RETURN_IF_ERROR(layer->backward(tape, hidden.view(), hidden.view(), {}, gradients));
  row.peak = process_bytes("VmHWM:") - before;
  row.tape = tape.num_bytes();
  row.held = layer->memory();
  return row;
}

double mib(int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

Result<bool> print_table(const bench::LayerShape& shape) {
  std::string text = fmt::format(
      "{} tokens, {} experts, top-{}, hidden {}, width {}, bf16, one rank; MiB\n"
      "| rows | preactivation | h | results | tape | offloaded | forward + backward | predicted in "
      "all | held in all | peak of the process |\n|---|---|---|---|---|---|---|---|---|---|\n",
      shape.num_tokens, shape.num_experts, shape.top_k, shape.hidden, shape.intermediate);
  // Every buffer a mapping of its own, given back at once: what one policy held is not there for the next.
  mallopt(M_MMAP_THRESHOLD, 1 << 16);
  bool as_predicted = true;
  for (const TapePolicy& policy : kPolicies) {
    ARGOSY_ASSIGN_OR_RETURN(const Row row, measure(shape, policy));
    as_predicted = as_predicted && row.predicted_bytes() == row.held_bytes();
    text +=
        fmt::format("| {} | {} | {} | {} | {:.1f} | {:.1f} | {:.1f} | {:.1f} | {:.1f} | {:.1f} |\n",
                    name_of(policy.rows), name_of(policy.preactivation), name_of(policy.h),
                    name_of(policy.results), mib(row.tape), mib(row.size.offload_bytes),
                    mib(row.held.forward_bytes + row.held.backward_bytes),
                    mib(row.predicted_bytes()), mib(row.held_bytes()), mib(row.peak));
  }
  text += as_predicted ? "every byte as predicted\n" : "NOT as predicted\n";
  ARGOSY_RETURN_IF_ERROR(write_stdout(text));
  return as_predicted;
}

}  // namespace

void add_memory_command(CLI::App& app, int* exit_code) {
  CLI::App* const command = app.add_subcommand(
      "memory", "What a training step of one layer holds by tape policy: predicted and measured");
  const auto shape =
      std::make_shared<bench::LayerShape>(bench::LayerShape{2048, 32, 4, 2048, 1024});
  const auto add = [&](const char* name, int64_t* value, const char* text) {
    command->add_option(name, *value, text)->type_name("N")->check(whole_number(1, 1 << 20));
  };
  add("--tokens", &shape->num_tokens, "Tokens (default: 2048)");
  add("--experts", &shape->num_experts, "Experts (default: 32)");
  add("--top-k", &shape->top_k, "Experts of a token (default: 4)");
  add("--hidden", &shape->hidden, "Width of a token (default: 2048)");
  add("--width", &shape->intermediate, "Width of an expert (default: 1024)");
  command->footer(
      "The peak is the process's, above what it had before the step: windows and what threads keep "
      "for\nproducts are in it, and so is glibc's own.\n\nExample:\n"
      "  argosy memory --tokens 2048 --experts 64 --top-k 8 --hidden 1024 --width 512");
  command->callback([shape, exit_code] {
    const Result<bool> as_predicted = print_table(*shape);
    *exit_code = !as_predicted.has_value() ? fail(as_predicted.error())
                                           : (*as_predicted ? kExitOk : kExitCheckFailed);
  });
}

}  // namespace argosy::tools
