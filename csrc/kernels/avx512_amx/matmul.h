// Matrix times activations with tiles of bf16, for a struct Tiles as in tiles.h. docs/adr/0043 has the arithmetic.
//
// Weights become bf16 with their scales applied; columns are added in ascending steps of 32, each step by one tile
// instruction, into a float that loses nothing on its way. So results depend on no size here.
#pragma once
#include "many_tokens.h"
#include "one_token.h"

namespace kvarn::avx512_amx {
namespace {

struct EvenFirst {
    alignas(64) uint16_t at[kTileColumns];
};

constexpr EvenFirst make_even_first() {
    EvenFirst order{};
    for (int i = 0; i < kTileColumns; ++i) order.at[i] = static_cast<uint16_t>(i < 16 ? 2 * i : 2 * i - 31);
    return order;
}

constexpr EvenFirst kEvenFirst = make_even_first();

template <class Tiles, class Format>
void matmul(const uint8_t* packed, const ActTile& tile, float* out, size_t out_stride, int rows, int group,
            int group_end) noexcept {
    if constexpr (NibbleValues<Format>::kExist)
        if (tile.n == 1) return OneToken<Tiles, Format>(packed, tile, out, out_stride, rows, group_end).run(group);
    if (tile.n <= kTileTokens) FewTokens<Tiles, Format>(packed, tile, out, out_stride, rows, group_end).run(group);
    else ManyTokens<Tiles, Format>(packed, tile, out, out_stride, rows, group_end).run(group);
}

void round_row(const float* x, int k, int t, int n, uint16_t* rounded) noexcept {
    const __m512i even_first = _mm512_load_si512(kEvenFirst.at);
    for (int block = 0; block < k / kTileColumns; ++block, x += kTileColumns) {
        const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + 16), _mm512_loadu_ps(x));
        uint16_t* to = rounded + (static_cast<size_t>(block) * n + t) * kTileColumns;
        _mm512_storeu_si512(to, _mm512_permutexvar_epi16(even_first, reinterpret_cast<__m512i>(both)));
    }
}

template <class Tiles>
constexpr KernelTable make_matmul_kernels() {
    KernelTable t{};
    t.round_row = round_row;
#define KVARN_SET(type) t.matmul[static_cast<int>(Type::type)] = matmul<Tiles, avx512_vnni::type>;
    KVARN_QUANTIZED_TYPES(KVARN_SET)
#undef KVARN_SET
    return t;
}

}  // namespace
}  // namespace kvarn::avx512_amx
