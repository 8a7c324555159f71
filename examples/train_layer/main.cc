// Trains one MoE layer to do what a frozen dense layer does, on hidden states captured from a real model.
//
//   train_layer --data FILE.safetensors:TENSOR [--ranks R] [--threads T] [--steps N] [--dtype bf16|fp32]
//               [--recipe mxfp8] [--capacity NUM/DEN] [--balance on|off] [--csv FILE]
//
// AdamW steps fp32 master weights, which are packed again for every step. The router is balanced by its selection bias
// alone, without a loss (--balance off: not at all). --capacity drops what an expert gets above its capacity; without it no token is ever dropped. Every
// printed number is the same for any number of ranks and threads. Public headers only; built and run against an installed
// Argosy by tests/package/.
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "argosy/bfloat16.h"
#include "argosy/bias_update.h"
#include "argosy/checkpoint.h"
#include "argosy/gradient_sync.h"
#include "argosy/moe.h"
#include "student.h"
#include "teacher.h"

namespace {

using argosy::ConstTensorView;
using argosy::DType;
using argosy::Group;
using argosy::MoeLayer;
using argosy::Result;
using argosy::Status;
using argosy::StatusCode;
using argosy::Tensor;
using argosy::TensorView;

constexpr int64_t kBatch = 128;  // tokens of a step, all ranks together
constexpr int64_t kTeacherIntermediate = 96;
constexpr float kBiasRate = 4e-3f;
constexpr double kMaxNorm = 1.0;
constexpr float kHalfRateStep = 150;  // at which the learning rate is half of that at first

struct Options {
  std::string data;
  int num_ranks = 1;
  int threads_per_rank = 1;
  int64_t num_steps = 600;
  DType dtype = DType::kBF16;
  argosy::BlockFormat format = argosy::BlockFormat::kUnset;  // of the experts' products
  std::optional<argosy::CapacitySpec> capacity;
  bool balance = true;
  std::string csv;
};

// What one step did, over all ranks.
struct StepRecord {
  double loss = 0;                // mean over tokens of |y - t|^2, in parts of the mean |t|^2
  std::vector<int64_t> assigned;  // [E] choices before any drop
  int64_t num_dropped = 0;
  double gradient_norm = 0;
};

// Hidden states and what the teacher makes of them; the same memory for all ranks.
struct Data {
  Tensor hidden;     // [T, H] of the layer's dtype
  Tensor target;     // fp32 [T, H]
  double power = 0;  // mean |t|^2 of a token
};

Result<Data> read_data(const Options& options) {
  ARGOSY_ASSIGN_OR_RETURN(const Tensor file, argosy::read_tensor_argument(options.data));
  const ConstTensorView view = file.view();
  if (view.num_dims != 2 || view.dtype != DType::kF32 || view.dim(0) < kBatch) {
    return Status(StatusCode::kInvalidArgument, "wanted F32 [at least " + std::to_string(kBatch) +
                                                    ", hidden], got " + argosy::describe(view));
  }
  Data data;
  ARGOSY_ASSIGN_OR_RETURN(data.hidden, Tensor::zeros(options.dtype, {view.dim(0), view.dim(1)}));
  ARGOSY_ASSIGN_OR_RETURN(Tensor seen, Tensor::zeros(DType::kF32, {view.dim(0), view.dim(1)}));
  // The teacher sees what the student sees: both get the rounded hidden states.
  for (int64_t i = 0; i < view.num_elements(); ++i) {
    const float value = view.as<float>()[i];
    const auto narrow = argosy::BFloat16::from_float(value);
    const bool is_bf16 = options.dtype == DType::kBF16;
    if (is_bf16) {
      data.hidden.view().as<argosy::BFloat16>()[i] = narrow;
    } else {
      data.hidden.view().as<float>()[i] = value;
    }
    seen.view().as<float>()[i] = is_bf16 ? narrow.to_float() : value;
  }
  ARGOSY_ASSIGN_OR_RETURN(data.target, run_teacher(seen.view(), kTeacherIntermediate));
  for (int64_t i = 0; i < view.num_elements(); ++i) {
    const double value = data.target.view().as<float>()[i];
    data.power += value * value / static_cast<double>(view.dim(0));
  }
  return data;
}

float value_of(ConstTensorView view, int64_t i) {
  return view.dtype == DType::kBF16 ? view.as<argosy::BFloat16>()[i].to_float()
                                    : view.as<float>()[i];
}

// The squared error of every token, and its gradient in the output, both in parts of `power`.
std::vector<double> errors_of(ConstTensorView output, ConstTensorView target, double power,
                              TensorView d_output) {
  const int64_t width = output.dim(1);
  std::vector<double> errors;
  for (int64_t token = 0; token < output.dim(0); ++token) {
    double sum = 0;
    for (int64_t i = token * width; i < (token + 1) * width; ++i) {
      const double error = static_cast<double>(value_of(output, i)) - target.as<float>()[i];
      sum += error * error / power;
      const auto gradient = static_cast<float>(2 * error / power);
      if (d_output.dtype == DType::kBF16) {
        d_output.as<argosy::BFloat16>()[i] = argosy::BFloat16::from_float(gradient);
      } else {
        d_output.as<float>()[i] = gradient;
      }
    }
    errors.push_back(sum);
  }
  return errors;
}

// The mean of all tokens' errors, added in global token order: on rank 0, elsewhere 0.
Result<double> mean_loss(Group& group, const std::vector<double>& errors) {
  std::vector<std::vector<std::byte>> all;
  ARGOSY_RETURN_IF_ERROR(group.gather(0, std::as_bytes(std::span(errors)), &all));
  double sum = 0;
  int64_t count = 0;
  for (const std::vector<std::byte>& part : all) {
    for (size_t at = 0; at < part.size(); at += sizeof(double)) {
      double error = 0;
      std::memcpy(&error, part.data() + at, sizeof(error));
      sum += error;
      ++count;
    }
  }
  return count == 0 ? 0.0 : sum / static_cast<double>(count);
}

// One rank of the training.
class Trainer {
 public:
  Trainer(Group& group, const Options& options, const Data& data)
      : group_(group),
        options_(options),
        data_(data),
        student_(shape(), group.rank(), group.num_ranks()) {}

  Status prepare() {
    const StudentShape student = shape();
    ARGOSY_ASSIGN_OR_RETURN(
        const argosy::RouterSpec router,
        argosy::router_preset("deepseek_v3", student.num_experts, student.top_k));
    argosy::MoeOptions layer;
    layer.hidden_dtype = options_.dtype;
    layer.training = true;
    layer.training_format = options_.format;
    layer.capacity = options_.capacity;
    ARGOSY_ASSIGN_OR_RETURN(argosy::MoeWeights weights, student_.make_weights());
    ARGOSY_ASSIGN_OR_RETURN(layer_, MoeLayer::create(group_, router, std::move(weights), layer));
    ARGOSY_ASSIGN_OR_RETURN(sync_, argosy::GradientSync::create(group_, nullptr));
    const int64_t most = kBatch / group_.num_ranks() + 1, width = data_.hidden.view().dim(1);
    ARGOSY_ASSIGN_OR_RETURN(output_, Tensor::zeros(options_.dtype, {most, width}));
    ARGOSY_ASSIGN_OR_RETURN(d_output_, Tensor::zeros(options_.dtype, {most, width}));
    return {};
  }

  Result<StepRecord> step(int64_t number) {
    // The batch is the next kBatch tokens; this rank has a slice of it.
    const int64_t num_batches = data_.hidden.view().dim(0) / kBatch;
    const int64_t begin = number % num_batches * kBatch;
    const int64_t first = argosy::owned_begin(kBatch, group_.num_ranks(), group_.rank());
    const int64_t count =
        argosy::owned_begin(kBatch, group_.num_ranks(), group_.rank() + 1) - first;
    const ConstTensorView hidden = ConstTensorView(data_.hidden.view()).rows(begin + first, count);
    const ConstTensorView target = ConstTensorView(data_.target.view()).rows(begin + first, count);
    const TensorView output = output_.view().rows(0, count);
    const TensorView d_output = d_output_.view().rows(0, count);

    argosy::MoeReport report;
    ARGOSY_RETURN_IF_ERROR(layer_->forward_train(hidden, nullptr, output, &tape_, &report));
    const std::vector<double> errors = errors_of(output, target, data_.power, d_output);
    StepRecord record;
    ARGOSY_ASSIGN_OR_RETURN(record.loss, mean_loss(group_, errors));
    ARGOSY_RETURN_IF_ERROR(layer_->backward(tape_, hidden, d_output, {}, student_.gradients()));
    // Means over the tokens of all ranks, clipped.
    ARGOSY_ASSIGN_OR_RETURN(const argosy::GradientSummary summary,
                            sync_->run(student_.gradients(), count, {.max_norm = kMaxNorm}));
    record.gradient_norm = summary.norm;
    // The rate falls with 1 / step, whatever the number of steps.
    AdamW adam;
    adam.learning_rate /= 1 + static_cast<float>(number) / kHalfRateStep;
    student_.step(adam);
    record.assigned =
        options_.capacity.has_value() ? report.assigned_per_expert : report.rows_per_expert;
    record.num_dropped = report.num_dropped;
    ARGOSY_RETURN_IF_ERROR(argosy::update_selection_bias(
        {.rate = options_.balance ? kBiasRate : 0.0f}, record.assigned, student_.selection_bias()));
    ARGOSY_RETURN_IF_ERROR(layer_->update_weights(
        [this](argosy::MoeWeights& weights) { return student_.write(weights); }));
    return record;
  }

 private:
  StudentShape shape() const {
    StudentShape shape;
    shape.hidden = data_.hidden.view().dim(1);
    shape.dtype = options_.dtype;
    return shape;
  }

  Group& group_;
  const Options& options_;
  const Data& data_;
  Student student_;
  std::unique_ptr<MoeLayer> layer_;
  std::unique_ptr<argosy::GradientSync> sync_;
  argosy::MoeTape tape_;
  Tensor output_, d_output_;
};

// Load over the last batches that together are all tokens, one even load = 1.
double balancedness_at(const std::vector<StepRecord>& records, size_t step, size_t num_batches) {
  std::vector<int64_t> loads(records[step].assigned.size(), 0);
  for (size_t at = step + 1 - std::min(step + 1, num_batches); at <= step; ++at) {
    for (size_t e = 0; e < loads.size(); ++e) loads[e] += records[at].assigned[e];
  }
  return argosy::balancedness(loads);
}

Status train(Group& group, const Options& options, const Data& data,
             std::vector<StepRecord>* records) {
  Trainer trainer(group, options, data);
  ARGOSY_RETURN_IF_ERROR(trainer.prepare());
  for (int64_t number = 0; number < options.num_steps; ++number) {
    ARGOSY_ASSIGN_OR_RETURN(StepRecord record, trainer.step(number));
    if (group.rank() == 0) records->push_back(std::move(record));
  }
  return group.barrier();
}

Status run_rank(int rank, const Options& options, std::shared_ptr<argosy::InprocWorld> world,
                const Data& data, std::vector<StepRecord>* records) {
  argosy::GroupOptions join;
  join.rank = rank;
  join.num_ranks = options.num_ranks;
  join.inproc = std::move(world);
  join.threads_per_rank = options.threads_per_rank;
  join.dot_order = argosy::DotOrder::kVdpbf16;  // the same numbers on every machine
  ARGOSY_ASSIGN_OR_RETURN(const auto group, Group::join(join));
  const Status status = train(*group, options, data, records);
  if (!status.ok()) group->abort(status);  // nobody waits for a rank that gave up
  return status;
}

Status write_csv(const std::vector<StepRecord>& records, size_t num_batches,
                 const std::string& path) {
  std::ofstream file(path);
  file << "step,loss,balancedness,dropped\n";
  for (size_t step = 0; step < records.size(); ++step) {
    char line[128];
    std::snprintf(line, sizeof(line), "%zu,%.6g,%.4f,%lld\n", step, records[step].loss,
                  balancedness_at(records, step, num_batches),
                  static_cast<long long>(records[step].num_dropped));
    file << line;
  }
  file.close();
  if (!file) return Status(StatusCode::kIo, "cannot write " + path);
  return {};
}

// The mean loss of `count` steps that end with `last`.
double mean_loss_before(const std::vector<StepRecord>& records, size_t last, size_t count) {
  double sum = 0;
  for (size_t at = last - count; at < last; ++at) sum += records[at].loss;
  return sum / static_cast<double>(count);
}

void print_summary(const Options& options, const std::vector<StepRecord>& records,
                   size_t num_batches) {
  std::printf("  step      loss  balancedness  dropped\n");
  const size_t stride = std::max<size_t>(1, records.size() / 10);
  for (size_t step = 0; step < records.size(); ++step) {
    if (step % stride != 0 && step + 1 != records.size()) continue;
    std::printf("%6zu  %8.5f  %12.3f  %7lld\n", step, records[step].loss,
                balancedness_at(records, step, num_batches),
                static_cast<long long>(records[step].num_dropped));
  }
  double least = 1;
  int64_t dropped = 0, assigned = 0;
  for (size_t step = 0; step < records.size(); ++step) {
    if (step >= records.size() / 2) {
      least = std::min(least, balancedness_at(records, step, num_batches));
    }
    dropped += records[step].num_dropped;
    for (const int64_t count : records[step].assigned) assigned += count;
  }
  const size_t window = std::min(records.size(), num_batches);
  std::printf("loss %.5f at first, %.5f at last\n", mean_loss_before(records, window, window),
              mean_loss_before(records, records.size(), window));
  std::printf("balancedness at least %.3f from step %zu on\n", least, records.size() / 2);
  std::printf("dropped %lld of %lld choices%s\n", static_cast<long long>(dropped),
              static_cast<long long>(assigned),
              options.capacity.has_value() ? "" : " (no capacity: none ever)");
}

bool parse_number(std::string_view text, int64_t* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size() && *value >= 1;
}

bool parse_capacity(std::string_view text, Options* options) {
  const size_t slash = text.find('/');
  argosy::CapacitySpec spec;
  spec.policy = argosy::CapacityPolicy::kWeight;
  if (!parse_number(text.substr(0, slash), &spec.factor_num)) return false;
  if (slash != std::string_view::npos && !parse_number(text.substr(slash + 1), &spec.factor_den)) {
    return false;
  }
  options->capacity = spec;
  return true;
}

bool parse_option(std::string_view name, const char* value, Options* options) {
  int64_t number = 0;
  if (name == "--data") {
    options->data = value;
  } else if (name == "--ranks" && parse_number(value, &number) && number <= 64) {
    options->num_ranks = static_cast<int>(number);
  } else if (name == "--threads" && parse_number(value, &number) && number <= 64) {
    options->threads_per_rank = static_cast<int>(number);
  } else if (name == "--steps" && parse_number(value, &number) && number <= 1'000'000) {
    options->num_steps = number;
  } else if (name == "--dtype" &&
             (std::string_view(value) == "bf16" || std::string_view(value) == "fp32")) {
    options->dtype = std::string_view(value) == "bf16" ? DType::kBF16 : DType::kF32;
  } else if (name == "--recipe" && std::string_view(value) == "mxfp8") {
    options->format = argosy::BlockFormat::kMxfp8;
  } else if (name == "--capacity") {
    return parse_capacity(value, options);
  } else if (name == "--balance" &&
             (std::string_view(value) == "on" || std::string_view(value) == "off")) {
    options->balance = std::string_view(value) == "on";
  } else if (name == "--csv") {
    options->csv = value;
  } else {
    return false;
  }
  return true;
}

Status run(const Options& options) {
  ARGOSY_ASSIGN_OR_RETURN(const Data data, read_data(options));
  ARGOSY_ASSIGN_OR_RETURN(const auto world, argosy::InprocWorld::create(options.num_ranks));
  std::vector<StepRecord> records;  // of rank 0
  std::vector<Status> status(static_cast<size_t>(options.num_ranks));
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    ranks.emplace_back([&, rank] {
      status[static_cast<size_t>(rank)] = run_rank(rank, options, world, data, &records);
    });
  }
  for (std::thread& thread : ranks) thread.join();
  for (const Status& one : status) ARGOSY_RETURN_IF_ERROR(one);
  const auto num_batches = static_cast<size_t>(data.hidden.view().dim(0) / kBatch);
  print_summary(options, records, num_batches);
  return options.csv.empty() ? Status() : write_csv(records, num_batches, options.csv);
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  bool is_right = argc % 2 == 1;
  for (int at = 1; is_right && at + 1 < argc; at += 2) {
    is_right = parse_option(argv[at], argv[at + 1], &options);
    if (!is_right) std::fprintf(stderr, "%s %s?\n", argv[at], argv[at + 1]);
  }
  if (!is_right || options.data.empty()) {
    std::fprintf(stderr,
                 "usage: train_layer --data FILE.safetensors:TENSOR [--ranks R] [--threads T] "
                 "[--steps N] [--dtype bf16|fp32] [--recipe mxfp8] [--capacity NUM/DEN] [--balance "
                 "on|off] [--csv FILE]\n");
    return 2;
  }
  const Status status = run(options);
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", status.to_string().c_str());
  return 1;
}
