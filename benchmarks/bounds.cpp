// What one machine can do at best with the bytes of a state: the rows that every codec is compared
// with. Compiled by bounds.py with the system compiler; no part of gymfast.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr std::size_t kPage = 4096;

// Runs work(first, last) over byte ranges that are whole pages, one range per thread.
void Split(std::size_t num_bytes, int num_threads,
           const std::function<void(int, std::size_t, std::size_t)>& work) {
  std::size_t pages = (num_bytes + kPage - 1) / kPage;
  std::vector<std::thread> threads;
  for (int i = 0; i < num_threads; ++i) {
    std::size_t first = std::min(num_bytes, pages * i / num_threads * kPage);
    std::size_t last = std::min(num_bytes, pages * (i + 1) / num_threads * kPage);
    if (i + 1 == num_threads) {
      work(i, first, num_bytes);
    } else {
      threads.emplace_back(work, i, first, last);
    }
  }
  for (std::thread& thread : threads) thread.join();
}

// Sums of per-page results, so that the compiler can neither drop the reads nor stop early.
template <typename Page>
std::uint64_t Fold(std::size_t num_bytes, int num_threads, const Page& page) {
  std::vector<std::uint64_t> sums(64 * static_cast<std::size_t>(num_threads), 0);
  Split(num_bytes, num_threads, [&](int i, std::size_t first, std::size_t last) {
    std::uint64_t sum = 0;
    for (std::size_t at = first; at + kPage <= last; at += kPage) sum += page(at);
    sums[64 * static_cast<std::size_t>(i)] = sum;
  });
  std::uint64_t total = 0;
  for (std::uint64_t sum : sums) total += sum;
  return total;
}

}  // namespace

extern "C" {

void bounds_memcpy(void* to, const void* from, std::size_t num_bytes, int num_threads) {
  Split(num_bytes, num_threads, [=](int, std::size_t first, std::size_t last) {
    std::memcpy(static_cast<char*>(to) + first, static_cast<const char*>(from) + first,
                last - first);
  });
}

// Returns 0 where there is no non-temporal store. Both buffers are aligned to 64 bytes.
int bounds_stream_copy(void* to, const void* from, std::size_t num_bytes, int num_threads) {
#if defined(__x86_64__)
  Split(num_bytes, num_threads, [=](int, std::size_t first, std::size_t last) {
    char* d = static_cast<char*>(to);
    const char* s = static_cast<const char*>(from);
    std::size_t at = first;
#if defined(__AVX512F__)
    for (; at + 64 <= last; at += 64) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(d + at), _mm512_loadu_si512(s + at));
    }
#elif defined(__AVX2__)
    for (; at + 32 <= last; at += 32) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(d + at),
                          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(s + at)));
    }
#else
    for (; at + 16 <= last; at += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(d + at),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(s + at)));
    }
#endif
    _mm_sfence();
    std::memcpy(d + at, s + at, last - at);
  });
  return 1;
#else
  (void)to, (void)from, (void)num_bytes, (void)num_threads;
  return 0;
#endif
}

// Number of pages in which the two states differ: reads both streams, writes nothing.
std::uint64_t bounds_compare(const std::uint64_t* a, const std::uint64_t* b, std::size_t num_bytes,
                             int num_threads) {
  return Fold(num_bytes, num_threads, [=](std::size_t at) {
    const std::uint64_t* x = a + at / 8;
    const std::uint64_t* y = b + at / 8;
    std::uint64_t differing = 0;
    for (std::size_t i = 0; i < kPage / 8; ++i) differing |= x[i] ^ y[i];
    return static_cast<std::uint64_t>(differing != 0);
  });
}

std::uint64_t bounds_read(const std::uint64_t* a, std::size_t num_bytes, int num_threads) {
  return Fold(num_bytes, num_threads, [=](std::size_t at) {
    const std::uint64_t* x = a + at / 8;
    std::uint64_t bits = 0;
    for (std::size_t i = 0; i < kPage / 8; ++i) bits |= x[i];
    return bits;
  });
}

}  // extern "C"
