#include "probe.h"

#include <chrono>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvarn {
namespace {

constexpr int kChains = 10;      // independent sums: more than the latency of a product takes to fill
constexpr int kSteps = 1 << 13;  // between two looks at the clock
constexpr size_t kLine = 64;
constexpr size_t kStreams = 8;

struct Operands {
    alignas(kLine) uint8_t u[kLine];
    alignas(kLine) int8_t s[kChains][kLine];
};

// Each runs kSteps times kChains products of one register and returns the products of bytes it did.
using Burst = size_t (*)(const Operands*, int32_t*);

// Hide where the operands lie, so that they are loaded again in every step. (A memory clobber would spill the sums.)
inline const Operands* hidden(const Operands* x) {
    asm volatile("" : "+r"(x));
    return x;
}

size_t burst_plain(const Operands* x, int32_t* sums) {
    for (int step = 0; step < kSteps; ++step) {
        x = hidden(x);
        for (int c = 0; c < kChains; ++c) {
            int32_t sum = sums[c];
            for (size_t i = 0; i < kLine; ++i) sum += static_cast<int32_t>(x->u[i]) * x->s[c][i];
            sums[c] = sum;
        }
    }
    return size_t{kSteps} * kChains * kLine;
}

#if defined(__x86_64__)
#define KVARN_TARGET(isa) __attribute__((target(isa), noinline))

KVARN_TARGET("avx2") size_t burst_avx2(const Operands* x, int32_t* sums) {
    __m256i acc_i32x8[kChains] = {};
    const __m256i ones_i16x16 = _mm256_set1_epi16(1);
    for (int step = 0; step < kSteps; ++step) {
        x = hidden(x);
        const __m256i u_u8x32 = _mm256_load_si256(reinterpret_cast<const __m256i*>(x->u));
#pragma GCC unroll 16
        for (int c = 0; c < kChains; ++c) {
            const __m256i s_i8x32 = _mm256_load_si256(reinterpret_cast<const __m256i*>(x->s[c]));
            const __m256i pairs_i16x16 = _mm256_maddubs_epi16(u_u8x32, s_i8x32);
            acc_i32x8[c] = _mm256_add_epi32(acc_i32x8[c], _mm256_madd_epi16(pairs_i16x16, ones_i16x16));
        }
    }
    for (int c = 0; c < kChains; ++c) sums[c] += _mm256_extract_epi32(acc_i32x8[c], 0);
    return size_t{kSteps} * kChains * 32;
}

KVARN_TARGET("avx512f,avx512bw") size_t burst_avx512(const Operands* x, int32_t* sums) {
    __m512i acc_i32x16[kChains] = {};
    const __m512i ones_i16x32 = _mm512_set1_epi16(1);
    for (int step = 0; step < kSteps; ++step) {
        x = hidden(x);
        const __m512i u_u8x64 = _mm512_load_si512(x->u);
#pragma GCC unroll 16
        for (int c = 0; c < kChains; ++c) {
            const __m512i pairs_i16x32 = _mm512_maddubs_epi16(u_u8x64, _mm512_load_si512(x->s[c]));
            acc_i32x16[c] = _mm512_add_epi32(acc_i32x16[c], _mm512_madd_epi16(pairs_i16x32, ones_i16x32));
        }
    }
    for (int c = 0; c < kChains; ++c) sums[c] += _mm_cvtsi128_si32(_mm512_castsi512_si128(acc_i32x16[c]));
    return size_t{kSteps} * kChains * 64;
}

KVARN_TARGET("avx512f,avx512bw,avx512vnni") size_t burst_avx512_vnni(const Operands* x, int32_t* sums) {
    __m512i acc_i32x16[kChains] = {};
    for (int step = 0; step < kSteps; ++step) {
        x = hidden(x);
        const __m512i u_u8x64 = _mm512_load_si512(x->u);
#pragma GCC unroll 16
        for (int c = 0; c < kChains; ++c)
            acc_i32x16[c] = _mm512_dpbusd_epi32(acc_i32x16[c], u_u8x64, _mm512_load_si512(x->s[c]));
    }
    for (int c = 0; c < kChains; ++c) sums[c] += _mm_cvtsi128_si32(_mm512_castsi512_si128(acc_i32x16[c]));
    return size_t{kSteps} * kChains * 64;
}

// Products of tiles, 16 x 16 x 32 of bf16 each. Assembly, as gcc before 13 has no such targets for a function.
size_t burst_avx512_amx(const Operands*, int32_t*) {
    constexpr int kTileSteps = kSteps / 8, kTiles = 8, kTileRows = 16;
    struct alignas(kLine) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } shape;
    for (int tile = 0; tile < kTiles; ++tile) shape.row_bytes[tile] = kLine, shape.rows[tile] = kTileRows;
    asm volatile("ldtilecfg %0" ::"m"(shape));
    for (int step = 0; step < kTileSteps; ++step)
        asm volatile(
            "tdpbf16ps %tmm6, %tmm4, %tmm0\n\ttdpbf16ps %tmm7, %tmm4, %tmm1\n\t"
            "tdpbf16ps %tmm6, %tmm5, %tmm2\n\ttdpbf16ps %tmm7, %tmm5, %tmm3");
    asm volatile("tilerelease");
    return size_t{kTileSteps} * 4 * kTileRows * kTileRows * 32;
}
#endif

Burst burst_named([[maybe_unused]] const std::string& table) {
#if defined(__x86_64__)
    if (table == "avx2") return burst_avx2;
    if (table == "avx512") return burst_avx512;
    if (table == "avx512_vnni") return burst_avx512_vnni;
    if (table == "avx512_amx") return burst_avx512_amx;
#endif
    return burst_plain;
}

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// One word of every line, in several streams at once: the memory is the limit then, not the loads.
uint64_t touch_lines(const uint8_t* data, size_t bytes) {
    const size_t stride = bytes / kStreams;
    uint64_t sum = 0;
    for (size_t at = 0; at + kLine <= stride; at += kLine) {
        for (size_t stream = 0; stream < kStreams; ++stream) {
            uint64_t word;
            std::memcpy(&word, data + stream * stride + at, sizeof word);
            sum += word;
        }
    }
    return sum;
}

}  // namespace

double probe_dot(const std::string& table, double seconds) {
    const Burst burst = burst_named(table);
    Operands x;
    for (size_t i = 0; i < kLine; ++i) x.u[i] = static_cast<uint8_t>(i % 16);
    for (int c = 0; c < kChains; ++c)
        for (size_t i = 0; i < kLine; ++i) x.s[c][i] = static_cast<int8_t>(static_cast<int>(i) % 7 - c % 5);
    int32_t sums[kChains] = {};
    const double start = now();
    double elapsed = 0, products = 0;
    while (elapsed < seconds) {
        products += static_cast<double>(burst(&x, sums));
        asm volatile("" ::"r"(sums) : "memory");
        elapsed = now() - start;
    }
    return 2 * products / elapsed;
}

double probe_read(const uint8_t* data, size_t bytes, double seconds) {
    const double start = now();
    double elapsed = 0, done = 0;
    for (size_t at = 0; elapsed < seconds; at = at + 2 * kProbeChunk <= bytes ? at + kProbeChunk : 0) {
        const uint64_t sum = touch_lines(data + at, kProbeChunk);
        asm volatile("" ::"r"(sum) : "memory");
        done += static_cast<double>(kProbeChunk);
        elapsed = now() - start;
    }
    return done / elapsed;
}

}  // namespace kvarn
