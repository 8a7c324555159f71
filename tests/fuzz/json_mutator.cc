// See json_mutator.h.
#include "fuzz/json_mutator.h"

#include <cstdint>
#include <iterator>
#include <limits>
#include <vector>

namespace argosy::testing {
namespace {

constexpr size_t kMaxNodes = 4096;

void collect(Tree& node, std::vector<Tree*>* nodes) {
  if (nodes->size() >= kMaxNodes) return;
  nodes->push_back(&node);
  if (node.is_structured()) {
    for (Tree& child : node) collect(child, nodes);
  }
}

Tree boundary(Random& random) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  constexpr int64_t kEdges[] = {0,
                                1,
                                -1,
                                2,
                                8,
                                255,
                                65536,
                                65537,
                                (int64_t{1} << 31) - 1,
                                int64_t{1} << 31,
                                (int64_t{1} << 31) + 1,
                                int64_t{1} << 32,
                                int64_t{1} << 40,
                                int64_t{1} << 61,
                                int64_t{1} << 62,
                                kMax - 1,
                                kMax,
                                std::numeric_limits<int64_t>::min()};
  switch (random.below(12)) {
    case 0:
      return Tree(std::numeric_limits<uint64_t>::max());
    case 1:
      return Tree(uint64_t{1} << 63);
    case 2:
      return Tree(1e300);
    case 3:
      return Tree(0.5);
    default:
      return Tree(kEdges[random.below(std::size(kEdges))]);
  }
}

Tree scalar(std::span<const std::string_view> words, Random& random) {
  switch (random.below(8)) {
    case 0:
      return Tree(nullptr);
    case 1:
      return Tree(random.one_in(2));
    case 2:
      return Tree::array();
    case 3:
      return Tree::object();
    case 4:
      return boundary(random);
    case 5: {
      constexpr std::string_view kOdd[] = {"", "\x1b[31m", "\n", "\xc3\xa9", "../x", "a/b"};
      if (random.one_in(4)) return Tree(std::string(150 + random.below(100), 'w') + "\xe2\x82\xac");
      return Tree(kOdd[random.below(std::size(kOdd))]);
    }
    default:
      return words.empty() ? Tree("word") : Tree(words[random.below(words.size())]);
  }
}

void edit_number(Tree& node, Random& random) {
  const bool nudge = node.is_number_integer() && random.one_in(2);
  if (!nudge) {
    node = boundary(random);
  } else if (node.is_number_unsigned()) {
    node = node.get<uint64_t>() + (random.one_in(2) ? 1u : ~uint64_t{0});
  } else {
    node = static_cast<uint64_t>(node.get<int64_t>()) + 1u;
  }
}

void edit_object(Tree& node, std::span<const std::string_view> words, Random& random) {
  const auto at = [&] {
    return std::next(node.begin(), static_cast<std::ptrdiff_t>(random.below(node.size())));
  };
  const std::string word(words.empty() ? "word" : words[random.below(words.size())]);
  if (node.empty()) {
    node[word] = scalar(words, random);
    return;
  }
  const auto one = at();
  switch (random.below(5)) {
    case 0:
      node.erase(one);
      break;
    case 1: {
      const Tree value = one.value();
      node.erase(one);
      node[word] = value;
      break;
    }
    case 2: {
      const std::string name = one.key() + static_cast<char>('a' + random.below(4));
      node[name] = Tree(one.value());
      break;
    }
    case 3:
      node[word] = scalar(words, random);
      break;
    default: {
      const auto other = at();
      std::swap(one.value(), other.value());
    }
  }
}

void edit_array(Tree& node, std::span<const std::string_view> words, Random& random) {
  const size_t size = node.size();
  switch (size == 0 ? 0 : random.below(4)) {
    case 0:
      node.push_back(random.one_in(2) ? boundary(random) : scalar(words, random));
      break;
    case 1:
      node.erase(random.below(size));
      break;
    case 2: {
      const Tree copy = node[random.below(size)];
      const size_t times = random.one_in(8) ? 70 : random.below(4) + 1;
      for (size_t i = 0; i < times; ++i) node.push_back(copy);
      break;
    }
    default:
      std::swap(node[random.below(size)], node[random.below(size)]);
  }
}

void nest(Tree& node, Random& random) {
  const size_t depth = random.one_in(2) ? 60 + random.below(10) : random.below(200) + 1;
  for (size_t i = 0; i < depth; ++i) {
    Tree inner = std::move(node);
    node = random.one_in(2) ? Tree::array({std::move(inner)}) : Tree{{"n", std::move(inner)}};
  }
}

void edit(Tree& tree, std::span<const std::string_view> words, Random& random) {
  std::vector<Tree*> nodes;
  collect(tree, &nodes);
  Tree& node = *nodes[random.below(nodes.size())];
  const Tree* other = nodes[random.below(nodes.size())];
  if (random.one_in(32)) return nest(node, random);
  if (random.one_in(16)) {
    const Tree copy = *other;  // `other` may lie in `node`
    node = copy;
    return;
  }
  if (random.one_in(16)) {
    node = scalar(words, random);
    return;
  }
  if (node.is_number()) return edit_number(node, random);
  if (node.is_object()) return edit_object(node, words, random);
  if (node.is_array()) return edit_array(node, words, random);
  node = scalar(words, random);
}

}  // namespace

std::string dump(const Tree& tree) {
  return tree.dump(-1, ' ', false, Tree::error_handler_t::replace);
}

std::string with_duplicate_key(const std::string& text, const Tree& tree, Random& random) {
  std::vector<const Tree*> objects;
  std::vector<Tree*> nodes;
  Tree copy = tree;
  collect(copy, &nodes);
  for (const Tree* node : nodes) {
    if (node->is_object() && !node->empty()) objects.push_back(node);
  }
  if (objects.empty()) return text;
  const Tree& object = *objects[random.below(objects.size())];
  const auto member =
      std::next(object.begin(), static_cast<std::ptrdiff_t>(random.below(object.size())));
  const std::string twice = dump(Tree(member.key())) + ":" + dump(member.value());
  const size_t at = text.find(twice);
  return at == std::string::npos ? text : std::string(text).insert(at, twice + ",");
}

std::string mutate_json(std::string_view text, std::span<const std::string_view> words,
                        Random& random, ByteMutator bytes) {
  Tree tree = Tree::parse(text, nullptr, /*allow_exceptions=*/false);
  if (tree.is_discarded() || random.one_in(16)) {
    std::string changed(text);
    bytes(&changed, random);
    return changed;
  }
  const size_t edits = random.below(4) + 1;
  for (size_t i = 0; i < edits; ++i) edit(tree, words, random);
  std::string changed = dump(tree);
  return random.one_in(16) ? with_duplicate_key(changed, tree, random) : changed;
}

}  // namespace argosy::testing
