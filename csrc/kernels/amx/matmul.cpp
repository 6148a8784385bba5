// Matrix times activations with tile instructions, for tiles of many tokens. Fewer go to the kernels of the parent
// folder, whose results have the same bits: sums over a step's part are integers and exact, and the floats that follow
// are added in the same order.
//
//   C (16 tokens x 16 rows) = A (16 tokens x 32 columns, int8) x B (32 columns x 16 rows, uint8), one step at a time
#include "../avx512_vnni/formats.h"
#include "functions.h"

namespace kvarn::amx {
namespace {

using avx512_vnni::Scales;
using avx512_vnni::Sixteen;

constexpr int kTileRows = 16;

// What the processor reads for its tile registers; rows beyond palette and row counts stay zero.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {};
    uint8_t rows[16] = {};
};

// Tile registers, by number: A of the first and of the second 16 tokens, B, C of either. The instructions want the
// numbers themselves.
constexpr int kA0 = 0, kA1 = 1, kB = 2, kC0 = 3, kC1 = 4;

struct StepInput {
    const int8_t* q;
    const float* scale;
    const float* sum;
};

template <class Format>
struct TileMatmul {
    using V = Sixteen;
    using Packed = typename Format::Packed;
    static constexpr int kSteps = Format::kSteps, kParts = Format::kParts;
    static constexpr int kPartBytes = kQuantBlock / kParts;

    const Packed* weights;
    const ActTile& tile;
    float* out;
    size_t out_stride;
    int rows;

    int first_tokens() const { return tile.n < kTileRows ? tile.n : kTileRows; }
    int second_tokens() const { return tile.n - first_tokens(); }

    void configure() const {
        TileConfig config;
        const auto set = [&](int number, int num_rows, int num_bytes) {
            config.rows[number] = static_cast<uint8_t>(num_rows);
            config.bytes_per_row[number] = static_cast<uint16_t>(num_rows > 0 ? num_bytes : 0);
        };
        set(kA0, first_tokens(), kPartBytes);
        set(kA1, second_tokens(), kPartBytes);
        set(kB, kPartBytes / 4, 64);
        set(kC0, first_tokens(), 64);
        set(kC1, second_tokens(), 64);
        _tile_loadconfig(&config);
    }

    StepInput input(int step) const {
        const size_t at = static_cast<size_t>(step) * tile.n;
        return {tile.q + at * kQuantBlock, tile.scale + at, tile.sum + at};
    }

    const Packed* blocks_of(int group) const {
        return weights + static_cast<size_t>(tile.k / kQuantBlock / kSteps) * group;
    }

    // dots[t][row] of one part, exact.
    void multiply(const uint8_t* columns, const StepInput& x, int part, int32_t (*dots)[kTileRows]) const {
        const int8_t* q = x.q + part * kPartBytes;
        _tile_loadd(2, columns + part * (kPartBytes / 4) * 64, 64);
        _tile_zero(3);
        _tile_loadd(0, q, kQuantBlock);
        _tile_dpbsud(3, 0, 2);
        _tile_stored(3, dots, 64);
        if (second_tokens() == 0) return;
        _tile_zero(4);
        _tile_loadd(1, q + kTileRows * kQuantBlock, kQuantBlock);
        _tile_dpbsud(4, 1, 2);
        _tile_stored(4, dots + kTileRows, 64);
    }

    // factor * (sum of the part's q) of one token.
    static int column_sum(const int8_t* q, int part, int factor) {
        const __m256i quads = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(static_cast<char>(factor)),
                                                  _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q)));
        __m128i half = part == 0 ? _mm256_castsi256_si128(quads) : _mm256_extracti128_si256(quads, 1);
        if (kParts == 1) half = _mm_add_epi32(half, _mm256_extracti128_si256(quads, 1));
        half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
        return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
    }

    void add_part(const Scales<V, kParts>& scales, const StepInput& x, int part, const int32_t (*dots)[kTileRows],
                  bool is_first, __m512* acc) const {
        for (int t = 0; t < tile.n; ++t) {
            __m512i dot = _mm512_load_si512(dots[t]);
            const int8_t* q = x.q + t * kQuantBlock;
            if (Format::kOffset != 0)
                dot = _mm512_sub_epi32(dot, _mm512_set1_epi32(column_sum(q, part, Format::kOffset)));
            const __m512 xd = V::all(x.scale[t]);
            __m512 sum = is_first ? V::zero() : acc[t];
            sum = V::add_product(V::floats(dot), V::times(scales.scale[part], xd), sum);
            if (Format::kHasMin) {
                const __m512 xsum =
                    kParts == 1 ? V::all(x.sum[t]) : V::times(V::floats(V::words(column_sum(q, part, 1))), xd);
                sum = V::add_product(scales.min[part], xsum, sum);
            }
            acc[t] = sum;
        }
    }

    void run_pair(int group) const {
        __m512 acc[kTileTokens];
        alignas(64) uint8_t columns[8 * 64];
        alignas(64) int32_t dots[kTileTokens][kTileRows];
        for (int step = 0; step < tile.k / kQuantBlock; ++step) {
            const Packed& a = blocks_of(group)[step / kSteps];
            const Packed& b = blocks_of(group + 1)[step / kSteps];
            __m512i w[8];
            Format::template unpack<V>(a, b, step % kSteps, w);
            for (int j = 0; j < 8; ++j) _mm512_store_si512(columns + 64 * j, w[j]);
            const Scales<V, kParts> scales = Format::template scales<V>(a, b, step % kSteps);
            const StepInput x = input(step);
            for (int part = 0; part < kParts; ++part) {
                multiply(columns, x, part, dots);
                add_part(scales, x, part, dots, step == 0 && part == 0, acc);
            }
        }
        const int left = rows - group * kLanes;
        for (int t = 0; t < tile.n; ++t)
            V::store(out + t * out_stride + group * kLanes, acc[t], left < kTileRows ? left : kTileRows);
    }
};

// Below this many tokens the tiles are too empty to pay.
constexpr int kFewestTokens = 8;

template <class Format>
inline void matmul(MatmulFn parent, const uint8_t* packed, const ActTile& tile, float* out, size_t out_stride, int rows,
                   int group, int group_end) {
    if (tile.n >= kFewestTokens && group + 2 <= group_end) {
        const auto* weights = reinterpret_cast<const typename Format::Packed*>(packed);
        const TileMatmul<Format> tiles{weights, tile, out, out_stride, rows};
        tiles.configure();
        for (; group + 2 <= group_end; group += 2) tiles.run_pair(group);
        _tile_release();
    }
    if (group < group_end) parent(packed, tile, out, out_stride, rows, group, group_end);
}

}  // namespace

#define KVARN_MATMUL(name, Format, type)                                                                            \
    void name(const uint8_t* packed, const ActTile& tile, float* out, size_t out_stride, int rows, int group_begin, \
              int group_end) noexcept {                                                                             \
        matmul<avx512_vnni::Format>(parent_matmul(Type::type), packed, tile, out, out_stride, rows, group_begin,    \
                                    group_end);                                                                     \
    }

KVARN_MATMUL(matmul_q4_0, Q4_0, Q4_0)
KVARN_MATMUL(matmul_q4_1, Q4_1, Q4_1)
KVARN_MATMUL(matmul_q5_0, Q5_0, Q5_0)
KVARN_MATMUL(matmul_q5_1, Q5_1, Q5_1)
KVARN_MATMUL(matmul_q8_0, Q8_0, Q8_0)
KVARN_MATMUL(matmul_q2_k, Q2_K, Q2_K)
KVARN_MATMUL(matmul_q3_k, Q3_K, Q3_K)
KVARN_MATMUL(matmul_q4_k, Q4_K, Q4_K)
KVARN_MATMUL(matmul_q5_k, Q5_K, Q5_K)
KVARN_MATMUL(matmul_q6_k, Q6_K, Q6_K)
KVARN_MATMUL(matmul_iq4_nl, IQ4_NL, IQ4_NL)
#undef KVARN_MATMUL

}  // namespace kvarn::amx
