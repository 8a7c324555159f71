// A folder of its own for one test, removed at the end. Guarded by its users' tests.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

namespace argosy::test {

class TempFolder {
 public:
  TempFolder() : path_(::testing::TempDir() + "argosy_io_XXXXXX") {
    if (::mkdtemp(path_.data()) == nullptr) ADD_FAILURE() << "cannot make " << path_;
  }
  ~TempFolder() { std::filesystem::remove_all(path_); }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string operator/(std::string_view name) const { return path_ + "/" + std::string(name); }

  std::string write(std::string_view name, std::string_view bytes) const {
    const std::string path = *this / name;
    // Some file systems flush a file that is cut to nothing and filled again.
    std::filesystem::remove(path);
    std::ofstream(path, std::ios::binary)
        .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    return path;
  }
  size_t num_files() const {
    size_t count = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(path_)) ++count;
    return count;
  }

 private:
  std::string path_;
};

inline std::string read_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Expects a failed Status or Result whose message holds every one of `words`.
template <typename Failed>
void expect_error(const Failed& failed, StatusCode code,
                  std::initializer_list<std::string_view> words) {
  Status status;
  if constexpr (std::is_same_v<Failed, Status>) {
    status = failed;
  } else {
    ASSERT_FALSE(failed.has_value());
    status = failed.error();
  }
  EXPECT_EQ(name_of(status.code()), name_of(code)) << status.message();
  for (const std::string_view word : words) {
    EXPECT_NE(status.message().find(word), std::string::npos)
        << "\"" << word << "\" is not in: " << status.message();
  }
}

}  // namespace argosy::test
