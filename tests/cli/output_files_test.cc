// Result files: no input is ever overwritten, and whatever fails, old files stay and nothing else
// does. Mutations tried, each makes a test fail: no way back for the first of two files, targets
// compared by their words, SIGXFSZ left as it is.
#include "tools/output_files.h"

#include <gtest/gtest.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <set>

#include "cli/cli_process.h"

namespace argosy::tools {
namespace {

namespace fs = std::filesystem;
using testing::fresh_dir;
using testing::read_text;
using testing::testdata;
using Words = std::vector<std::string>;

void write(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

std::set<std::string> names_in(const std::string& dir) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(dir)) names.insert(entry.path().filename());
  return names;
}

// A message that names option, target and input, or ok.
Status check(const std::string& output, const std::string& json, const std::string& input,
             const std::string& model = "") {
  const std::array<OptionFile, 2> targets = {{{"--output", output}, {"--json", json}}};
  const std::array<OptionFile, 1> inputs = {{{"--input", input}}};
  return check_targets(targets, inputs, model);
}

void expect_refused(const Status& status, const Words& named) {
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  for (const std::string& word : named) {
    EXPECT_NE(status.message().find(word), std::string::npos) << word << "\n" << status.message();
  }
}

TEST(CheckTargets, AnInputIsFoundByAnyName) {
  const std::string dir = fresh_dir("targets");
  write(dir + "/in", "x");
  fs::create_symlink("in", dir + "/link");
  fs::create_hard_link(dir + "/in", dir + "/hard");
  fs::create_directory_symlink(dir, dir + "/same");
  for (const std::string name : {"/in", "/./in", "/link", "/hard", "/same/in"}) {
    SCOPED_TRACE(name);
    expect_refused(check(dir + name, "", dir + "/in"), {"--output", dir + name, "--input"});
    expect_refused(check("", dir + name, dir + "/in"), {"--json", dir + name, "--input"});
  }
  EXPECT_TRUE(check(dir + "/out", dir + "/out.json", dir + "/in").ok());
  EXPECT_TRUE(check("", "", dir + "/in").ok());
}

TEST(CheckTargets, TwoTargetsMayNotBeOneFile) {
  const std::string dir = fresh_dir("two_targets");
  fs::create_directory_symlink(dir, dir + "/same");
  for (const std::string name : {"/out", "/./out", "/same/out", "/same/./out"}) {
    expect_refused(check(dir + "/out", dir + name, "in"), {"--output", "--json", dir + name});
  }
}

TEST(CheckTargets, FilesOfTheModelFolderStay) {
  const std::string dir = fresh_dir("model_target");
  fs::create_directories(dir + "/model/sub");
  write(dir + "/blob", "weights");
  write(dir + "/model/config.json", "{}");
  fs::create_symlink("../blob", dir + "/model/model.safetensors");
  for (const std::string name : {"/model/config.json", "/model/model.safetensors", "/blob"}) {
    expect_refused(check(dir + name, "", "in", dir + "/model"),
                   {"--output", dir + name, "--model"});
  }
  EXPECT_TRUE(check(dir + "/model/new", dir + "/model/sub/new", "in", dir + "/model").ok());
  EXPECT_TRUE(check(dir + "/new", "", "in", dir + "/no_such_model").ok());
}

TEST(OutputFiles, AppearTogetherAndOnlyThen) {
  const std::string dir = fresh_dir("together");
  write(dir + "/a", "old");
  write(dir + "/a.partial0", "the user's");
  {
    OutputFiles files;
    ASSERT_TRUE(files.add_text(dir + "/a", "new a").ok());
    ASSERT_TRUE(files.add_text(dir + "/b", "new b").ok());
    EXPECT_EQ(read_text(dir + "/a"), "old");
    EXPECT_FALSE(fs::exists(dir + "/b"));
  }
  EXPECT_EQ(names_in(dir), (std::set<std::string>{"a", "a.partial0"}));
  OutputFiles files;
  ASSERT_TRUE(files.add_text(dir + "/a", "new a").ok());
  ASSERT_TRUE(files.add_text(dir + "/b", "new b").ok());
  ASSERT_TRUE(files.commit().ok());
  EXPECT_EQ(read_text(dir + "/a"), "new a");
  EXPECT_EQ(read_text(dir + "/b"), "new b");
  EXPECT_EQ(read_text(dir + "/a.partial0"), "the user's");
  EXPECT_EQ(names_in(dir).size(), 3u);
}

TEST(OutputFiles, AFailedRenameGivesTheOthersTheirOldFilesBack) {
  const std::string dir = fresh_dir("rename");
  write(dir + "/a", "old");
  {
    OutputFiles files;
    for (const std::string name : {"/a", "/b", "/c"}) {
      ASSERT_TRUE(files.add_text(dir + name, "new").ok());
    }
    fs::create_directory(dir + "/c");  // a file cannot be renamed to it
    const Status status = files.commit();
    EXPECT_EQ(status.code(), StatusCode::kIo);
    EXPECT_NE(status.message().find("/c': Is a directory"), std::string::npos) << status.message();
  }
  EXPECT_EQ(names_in(dir), (std::set<std::string>{"a", "c"}));
  EXPECT_EQ(read_text(dir + "/a"), "old");
}

TEST(OutputFiles, ErrorsGiveTheReasonOfTheSystem) {
  OutputFiles files;
  const std::string path = fresh_dir("reason") + "/absent/x";
  const Status text = files.add_text(path, "x");
  EXPECT_EQ(text.message(), "cannot create '" + path + "': No such file or directory");
}

// Runs the tool in a shell, with `before` and `after` around the command.
int run_in_shell(const std::string& before, const Words& arguments, const std::string& after) {
  std::string command = before + " '" ARGOSY_CLI "'";
  for (const std::string& word : arguments) command += " '" + word + "'";
  const int status = std::system((command + " " + after).c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

Words run_into(const std::string& output, const std::string& json) {
  return testing::run_arguments("mixtral_tiny", 0, "f32",
                                {"--check", "none", "--output", output, "--json", json});
}

Words route_into(const std::string& json) {
  const std::string seed = testdata("seed_example/seed_example.safetensors");
  return {"route",
          "--input",
          seed + ":tokens",
          "--gate",
          seed + ":gate.weight",
          "--preset",
          "mixtral",
          "--experts",
          "8",
          "--top-k",
          "2",
          "--json",
          json};
}

TEST(OutputOfCommands, OldFilesStayWhenAnotherCannotBeWritten) {
  const std::string dir = fresh_dir("unwritable");
  write(dir + "/out", "old");
  const testing::CliResult result = testing::run_cli(run_into(dir + "/out", "/proc/argosy.json"));
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.err.find("'/proc/argosy.json': "), std::string::npos) << result.err;
  EXPECT_EQ(names_in(dir), std::set<std::string>{"out"});
  EXPECT_EQ(read_text(dir + "/out"), "old");
}

TEST(OutputOfCommands, AFullStdoutLeavesFilesAsTheyWere) {
  if (!testing::exists("/dev/full")) GTEST_SKIP() << "no /dev/full";
  const std::string dir = fresh_dir("full_stdout");
  const std::string err = dir + "/err";
  write(dir + "/out", "old");
  const std::vector<Words> commands = {run_into(dir + "/out", dir + "/json"),
                                       route_into(dir + "/json"),
                                       {"info", "--json", dir + "/json"}};
  for (const Words& words : commands) {
    EXPECT_EQ(run_in_shell("", words, ">/dev/full 2>'" + err + "'"), 2) << words[0];
    EXPECT_NE(read_text(err).find("standard output: No space left"), std::string::npos)
        << read_text(err);
    EXPECT_EQ(names_in(dir), (std::set<std::string>{"err", "out"})) << words[0];
  }
  EXPECT_EQ(read_text(dir + "/out"), "old");
}

TEST(OutputOfCommands, AFileSizeLimitIsAnErrorThatLeavesNothing) {
  const std::string dir = fresh_dir("size_limit");
  const std::string err = dir + "/err";
  for (const Words& words :
       {run_into(dir + "/out", "-"),
        testing::run_arguments("mixtral_tiny", 0, "f32",
                               {"--check", "none", "--json", dir + "/json"})}) {
    // One block: 512 or 1024 bytes.
    EXPECT_EQ(run_in_shell("(ulimit -f 1;", words, ">/dev/null 2>'" + err + "')"), 2);
    EXPECT_NE(read_text(err).find("File too large"), std::string::npos) << read_text(err);
    EXPECT_EQ(names_in(dir), std::set<std::string>{"err"});
  }
}

TEST(OutputOfCommands, InputsAreNotOverwritten) {
  const std::string dir = fresh_dir("inputs");
  fs::copy(testdata("models/mixtral_tiny"), dir + "/model");
  const std::string captures = dir + "/captures.safetensors";
  fs::rename(dir + "/model/captures.safetensors", captures);
  fs::copy_file(captures, dir + "/compare.safetensors");
  const Words run = {"run",
                     "--model",
                     dir + "/model",
                     "--layer",
                     "0",
                     "--input",
                     captures + ":f32.layers.0.moe_input",
                     "--compare",
                     dir + "/compare.safetensors:f32.layers.0"};
  for (const std::string option : {"--output", "--json", "--report", "--trace"}) {
    for (const std::string name : {"/captures.safetensors", "/compare.safetensors",
                                   "/model/config.json", "/model/model.safetensors"}) {
      Words words = run;
      words.insert(words.end(), {option, dir + name});
      const std::string before = read_text(dir + name);
      const testing::CliResult result = testing::run_cli(words);
      EXPECT_EQ(result.exit_code, 2) << option << " " << name;
      EXPECT_EQ(result.out, "");
      EXPECT_NE(result.err.find(option + " '" + dir + name), std::string::npos) << result.err;
      EXPECT_TRUE(read_text(dir + name) == before) << option << " " << name;
    }
  }
  const testing::CliResult twice = testing::run_cli(run_into(dir + "/x", dir + "/./x"));
  EXPECT_EQ(twice.exit_code, 2);
  EXPECT_NE(twice.err.find("are the same file"), std::string::npos) << twice.err;
}

TEST(OutputOfCommands, InputsOfRouteAreNotOverwritten) {
  const std::string dir = fresh_dir("route_inputs");
  const std::string seed = testdata("seed_example/seed_example.safetensors");
  for (const std::string name : {"tokens", "gate", "bias"}) fs::copy_file(seed, dir + "/" + name);
  for (const std::string name : {"tokens", "gate", "bias"}) {
    const testing::CliResult result = testing::run_cli(
        {"route", "--input", dir + "/tokens:tokens", "--gate", dir + "/gate:gate.weight",
         "--gate-bias", dir + "/bias:gate.bias", "--preset", "mixtral", "--experts", "8", "--top-k",
         "2", "--json", dir + "/" + name});
    EXPECT_EQ(result.exit_code, 2) << name;
    EXPECT_TRUE(read_text(dir + "/" + name) == read_text(seed)) << name;
  }
}

}  // namespace
}  // namespace argosy::tools
