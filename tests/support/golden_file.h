// A safetensors file of testdata/ for tests of layers below io: no checks, well-formed files only.
#pragma once

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace argosy::testing {

class GoldenFile {
 public:
  explicit GoldenFile(const std::string& name) {
    std::ifstream file(std::string(ARGOSY_TESTDATA) + "/" + name, std::ios::binary);
    bytes_.assign(std::istreambuf_iterator<char>(file), {});
    uint64_t header_bytes = 0;
    std::memcpy(&header_bytes, bytes_.data(), sizeof(header_bytes));
    const char* header = bytes_.data() + sizeof(header_bytes);
    header_ = nlohmann::json::parse(header, header + header_bytes);
    data_ = header + header_bytes;
  }

  const nlohmann::json& header() const { return header_; }
  std::vector<int64_t> shape(const std::string& tensor) const {
    return header_.at(tensor).at("shape");
  }

  template <typename T>
  std::vector<T> read(const std::string& tensor) const {
    const std::vector<size_t> range = header_.at(tensor).at("data_offsets");
    std::vector<T> values((range[1] - range[0]) / sizeof(T));
    std::memcpy(values.data(), data_ + range[0], range[1] - range[0]);
    return values;
  }

 private:
  std::vector<char> bytes_;
  nlohmann::json header_;
  const char* data_ = nullptr;
};

}  // namespace argosy::testing
