// The text of settings: for each, length and bytes of the field, length and bytes of the value. It
// comes from peers, so it is parsed with every length checked. Test: tests/transport/group_test.cc.
#define XXH_INLINE_ALL
#include "transport/agree.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "transport/describe.h"

namespace argosy::transport {
namespace {

struct Fingerprint {
  uint64_t low = 0;
  uint64_t high = 0;
  int64_t text_bytes = 0;

  friend bool operator==(const Fingerprint&, const Fingerprint&) = default;
};

// A setting inside a text, or the absence of one.
struct Entry {
  bool exists = false;
  std::string_view field;
  std::string_view value;

  friend bool operator==(const Entry&, const Entry&) = default;
};

// An error message shows the start of long values, and not every one of many.
constexpr size_t kMaxShownBytes = 200;
constexpr size_t kMaxShownValues = 8;

void append(std::string* text, std::string_view part) {
  const auto size = static_cast<uint32_t>(part.size());
  text->append(reinterpret_cast<const char*>(&size), sizeof(size));
  text->append(part);
}

std::string text_of(std::span<const Setting> settings) {
  std::string text;
  for (const Setting& setting : settings) {
    append(&text, setting.field);
    append(&text, setting.value);
  }
  return text;
}

bool take(std::string_view* text, std::string_view* part) {
  uint32_t size = 0;
  if (text->size() < sizeof(size)) return false;
  std::memcpy(&size, text->data(), sizeof(size));
  text->remove_prefix(sizeof(size));
  if (text->size() < size) return false;
  *part = text->substr(0, size);
  text->remove_prefix(size);
  return true;
}

Result<std::vector<Entry>> parse(std::string_view text, int rank) {
  std::vector<Entry> entries;
  while (!text.empty()) {
    Entry entry{.exists = true, .field = {}, .value = {}};
    if (!take(&text, &entry.field) || !take(&text, &entry.value)) {
      return base::error(StatusCode::kCorruptData, "settings of rank {} end inside setting {}",
                         rank, entries.size());
    }
    entries.push_back(entry);
  }
  return entries;
}

std::string shown(std::string_view value) {
  if (value.size() <= kMaxShownBytes) return fmt::format("\"{}\"", value);
  return fmt::format("\"{}\"... ({} bytes)", value.substr(0, kMaxShownBytes), value.size());
}

// `"4" on ranks 0, 2-3; "8" on rank 1`, by rising first rank; entries that are shown alike count as
// equal.
template <typename Shown>
std::string list_by_rank(const std::vector<Entry>& entries, const Shown& shown_of) {
  std::vector<std::pair<std::string, std::vector<int>>> ranks_of;
  for (size_t rank = 0; rank < entries.size(); ++rank) {
    const std::string key = shown_of(entries[rank]);
    auto at = std::ranges::find_if(ranks_of, [&](const auto& each) { return each.first == key; });
    if (at == ranks_of.end()) at = ranks_of.insert(ranks_of.end(), {key, {}});
    at->second.push_back(static_cast<int>(rank));
  }
  std::string text;
  for (size_t i = 0; i < std::min(ranks_of.size(), kMaxShownValues); ++i) {
    if (i > 0) text += "; ";
    const std::vector<int>& ranks = ranks_of[i].second;
    text += fmt::format("{} on {} {}", ranks_of[i].first, ranks.size() > 1 ? "ranks" : "rank",
                        describe_ranks(ranks));
  }
  if (ranks_of.size() > kMaxShownValues) {
    text += fmt::format("; and {} more values", ranks_of.size() - kMaxShownValues);
  }
  return text;
}

Status disagreement(size_t index, const std::vector<Entry>& at_index) {
  const bool same_field = std::ranges::all_of(at_index, [&](const Entry& entry) {
    return entry.exists && entry.field == at_index[0].field;
  });
  if (same_field) {
    return base::error(
        StatusCode::kDisagree, "{} differs: {}", shown(at_index[0].field),
        list_by_rank(at_index, [](const Entry& entry) { return shown(entry.value); }));
  }
  return base::error(StatusCode::kDisagree, "setting {} differs: {}", index,
                     list_by_rank(at_index, [](const Entry& entry) {
                       if (!entry.exists) return std::string("none");
                       return fmt::format("{} = {}", shown(entry.field), shown(entry.value));
                     }));
}

Result<std::vector<std::vector<Entry>>> parse_all(const AllGather& texts) {
  std::vector<std::vector<Entry>> all;
  for (int rank = 0; rank < texts.num_ranks(); ++rank) {
    const std::span<const std::byte> bytes = texts.from(rank);
    const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    ARGOSY_ASSIGN_OR_RETURN(std::vector<Entry> entries, parse(text, rank));
    all.push_back(std::move(entries));
  }
  return all;
}

}  // namespace

Result<std::unique_ptr<Agreement>> Agreement::create(Endpoint& endpoint,
                                                     platform::Deadline deadline) {
  ARGOSY_ASSIGN_OR_RETURN(auto hashes, AllGather::create(endpoint, sizeof(Fingerprint), deadline));
  ARGOSY_ASSIGN_OR_RETURN(auto texts, AllGather::create(endpoint, kMaxSettingsBytes, deadline));
  return std::unique_ptr<Agreement>(new Agreement(std::move(hashes), std::move(texts)));
}

Status Agreement::agree(std::span<const Setting> settings, platform::Deadline deadline) {
  const std::string text = text_of(settings);
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  const Fingerprint mine{hash.low64, hash.high64, static_cast<int64_t>(text.size())};
  ARGOSY_RETURN_IF_ERROR(hashes_->issue(std::as_bytes(std::span(&mine, 1))));
  ARGOSY_RETURN_IF_ERROR(hashes_->wait(deadline, "comparison of settings"));
  bool all_equal = true;
  for (int rank = 0; rank < hashes_->num_ranks(); ++rank) {
    Fingerprint theirs;
    if (hashes_->from(rank).size() != sizeof(theirs)) {
      return base::error(StatusCode::kCorruptData, "settings hash of rank {} has {} bytes, want {}",
                         rank, hashes_->from(rank).size(), sizeof(theirs));
    }
    std::memcpy(&theirs, hashes_->from(rank).data(), sizeof(theirs));
    if (theirs.text_bytes > kMaxSettingsBytes) {
      return base::invalid("settings of rank {} need {} bytes, the limit is {}", rank,
                           theirs.text_bytes, kMaxSettingsBytes);
    }
    all_equal = all_equal && theirs == mine;
  }
  return all_equal ? Status() : name_difference(std::as_bytes(std::span(text)), deadline);
}

// Every rank comes here or none: all saw the same hashes.
Status Agreement::name_difference(std::span<const std::byte> text, platform::Deadline deadline) {
  ARGOSY_RETURN_IF_ERROR(texts_->issue(text));
  ARGOSY_RETURN_IF_ERROR(texts_->wait(deadline, "comparison of settings"));
  ARGOSY_ASSIGN_OR_RETURN(const auto all, parse_all(*texts_));
  size_t num_settings = 0;
  for (const std::vector<Entry>& entries : all) {
    num_settings = std::max(num_settings, entries.size());
  }
  for (size_t i = 0; i < num_settings; ++i) {
    std::vector<Entry> at_index;
    for (const std::vector<Entry>& entries : all) {
      at_index.push_back(i < entries.size() ? entries[i] : Entry{});
    }
    const bool differs =
        std::ranges::any_of(at_index, [&](const Entry& entry) { return !(entry == at_index[0]); });
    if (differs) return disagreement(i, at_index);
  }
  return base::error(StatusCode::kInternal, "settings hashes differ, but their {} fields do not",
                     num_settings);
}

}  // namespace argosy::transport
