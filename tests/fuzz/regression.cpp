// Replays files and folders through a fuzz target, with any compiler and without a fuzzer; also
// every prefix of each small file. Prints the number of inputs.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

constexpr std::size_t kMaxPrefixes = 64;

// A copy of exact size, so that ASan sees reads behind the input.
void replay(const std::vector<char>& bytes, std::size_t size) {
  const auto* first = reinterpret_cast<const std::uint8_t*>(bytes.data());
  const std::vector<std::uint8_t> exact(first, first + size);
  LLVMFuzzerTestOneInput(exact.data(), exact.size());
}

std::size_t replay_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  if (file.bad()) return 0;
  for (std::size_t size = 0; size < std::min(bytes.size(), kMaxPrefixes); ++size) {
    replay(bytes, size);
  }
  replay(bytes, bytes.size());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::filesystem::path> files;
  for (int i = 1; i < argc; ++i) {
    if (!std::filesystem::is_directory(argv[i])) {
      files.emplace_back(argv[i]);
      continue;
    }
    for (const auto& entry : std::filesystem::directory_iterator(argv[i])) {
      files.push_back(entry.path());
    }
  }
  std::sort(files.begin(), files.end());
  std::size_t num_inputs = 0;
  for (const auto& file : files) num_inputs += replay_file(file);
  std::printf("%zu inputs\n", num_inputs);
  return num_inputs == files.size() && num_inputs != 0 ? 0 : 1;
}
