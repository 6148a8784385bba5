// How each packed type turns a step of 32 columns into eight vectors of unsigned bytes and its scales.
// Vector j holds columns 4j .. 4j + 3 of row 0, then of row 1, and so on. A step has kParts equal parts, each with a
// scale (and minimum) of its own:
//   W = scale[part] * (w - kOffset) + min[part]        min only where kHasMin
#pragma once
#include "lanes.h"

namespace kvarn::avx512_vnni {
namespace {

template <class V, int kParts>
struct Scales {
    typename V::Floats scale[kParts], min[kParts];
};

// What the scales of all steps of a block have in common.
template <class V>
struct Factors {
    typename V::Floats d, minus_dmin;
};

template <class V, class Packed>
[[gnu::always_inline]] inline Factors<V> factors_of(const Packed& a, const Packed& b) {
    if constexpr (requires { a.dmin; })
        return {V::halves(a.d, b.d), V::times(V::halves(a.dmin, b.dmin), V::all(-1.0f))};
    else return {V::halves(a.d, b.d), V::zero()};
}

template <class V>
[[gnu::always_inline]] inline void unpack_nibbles(const packed::Nibbles& a, const packed::Nibbles& b,
                                                  typename V::Ints w[8]) {
    const typename V::Ints mask = V::bytes(15);
    for (int j = 0; j < 4; ++j) {
        const typename V::Ints pairs = V::load(a[j], b[j]);
        w[j] = V::both(pairs, mask);
        w[4 + j] = V::both(V::down(pairs, 4), mask);
    }
}

// Shifts move bits between bytes; the masks drop those. Places are constant after inlining.
template <class V>
inline typename V::Ints shifted(typename V::Ints x, int places) {
    return places >= 0 ? V::up(x, places) : V::down(x, -places);
}

// w[j] |= bit j of every byte, moved to bit kTo.
template <class V, int kTo>
[[gnu::always_inline]] inline void add_bits(const packed::OneBit& a, const packed::OneBit& b, typename V::Ints w[8]) {
    const typename V::Ints all = V::load(a, b), mask = V::bytes(1 << kTo);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) w[j] = V::either(w[j], V::both(shifted<V>(all, kTo - j), mask));
}

// w[4i + j] |= bits 2j..2j+1 of the bytes of field i, moved to bit kTo.
template <class V, int kTo>
[[gnu::always_inline]] inline void add_two_bits(const packed::TwoBits& a, const packed::TwoBits& b,
                                                typename V::Ints w[8]) {
    const typename V::Ints mask = V::bytes(3 << kTo);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
        const typename V::Ints fields = shifted<V>(V::load(a[j / 4], b[j / 4]), kTo - 2 * (j % 4));
        w[j] = V::either(w[j], V::both(fields, mask));
    }
}

template <class V>
[[gnu::always_inline]] inline void unpack_two_bits(const packed::TwoBits& a, const packed::TwoBits& b,
                                                   typename V::Ints w[8]) {
    const typename V::Ints mask = V::bytes(3);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) w[j] = V::both(V::down(V::load(a[j / 4], b[j / 4]), 2 * (j % 4)), mask);
}

// Nibbles with a scale and a minimum of 32 columns.
template <class PackedType, int kMinFactor, bool kHasHighBit>
struct Simple {
    using Packed = PackedType;
    static constexpr int kSteps = 1, kParts = 1, kOffset = 0;
    static constexpr bool kHasMin = true;

    template <class V>
    [[gnu::always_inline]] static void unpack(const Packed& a, const Packed& b, int, typename V::Ints w[8]) {
        unpack_nibbles<V>(a.nibbles, b.nibbles, w);
        if constexpr (kHasHighBit) add_bits<V, 4>(a.high, b.high, w);
    }
    template <class V>
    [[gnu::always_inline]] static Scales<V, 1> scales(const Packed& a, const Packed& b, int, const Factors<V>& of) {
        if constexpr (kMinFactor == 0) return {{of.d}, {V::halves(a.m, b.m)}};
        else return {{of.d}, {V::times(of.d, V::all(static_cast<float>(kMinFactor)))}};
    }
};

using Q4_0 = Simple<packed::Q4_0, -8, false>;
using Q4_1 = Simple<packed::Q4_1, 0, false>;
using Q5_0 = Simple<packed::Q5_0, -16, true>;
using Q5_1 = Simple<packed::Q5_1, 0, true>;

template <class PackedType, bool kHasHighBit>
struct SuperBlock {
    using Packed = PackedType;
    static constexpr int kSteps = 8, kParts = 1, kOffset = 0;
    static constexpr bool kHasMin = true;

    template <class V>
    [[gnu::always_inline]] static void unpack(const Packed& a, const Packed& b, int s, typename V::Ints w[8]) {
        unpack_nibbles<V>(a.nibbles[s], b.nibbles[s], w);
        if constexpr (kHasHighBit) add_bits<V, 4>(a.high[s], b.high[s], w);
    }
    template <class V>
    [[gnu::always_inline]] static Scales<V, 1> scales(const Packed& a, const Packed& b, int s, const Factors<V>& of) {
        return {{V::times(of.d, V::small(a.scale[s], b.scale[s]))},
                {V::times(of.minus_dmin, V::small(a.min[s], b.min[s]))}};
    }
};

using Q4_K = SuperBlock<packed::Q4_K, false>;
using Q5_K = SuperBlock<packed::Q5_K, true>;

// Signed weights, moved up by 128.
struct Q8_0 {
    using Packed = packed::Q8_0;
    static constexpr int kSteps = 1, kParts = 1, kOffset = 128;
    static constexpr bool kHasMin = false;

    template <class V>
    [[gnu::always_inline]] static void unpack(const Packed& a, const Packed& b, int, typename V::Ints w[8]) {
        const typename V::Ints sign = V::bytes(0x80);
        for (int j = 0; j < 8; ++j) w[j] = V::differ(V::load(a.q[j], b.q[j]), sign);
    }
    template <class V>
    [[gnu::always_inline]] static Scales<V, 1> scales(const Packed&, const Packed&, int, const Factors<V>& of) {
        return {{of.d}, {V::zero()}};
    }
};

struct IQ4_NL {
    using Packed = packed::Q4_0;
    static constexpr int kSteps = 1, kParts = 1, kOffset = 128;
    static constexpr bool kHasMin = false;

    template <class V>
    [[gnu::always_inline]] static void unpack(const Packed& a, const Packed& b, int, typename V::Ints w[8]) {
        const __m128i values =
            _mm_xor_si128(_mm_setr_epi8(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
                          _mm_set1_epi8(static_cast<char>(0x80)));
        unpack_nibbles<V>(a.nibbles, b.nibbles, w);
        for (int j = 0; j < 8; ++j) w[j] = V::look_up(values, w[j]);
    }
    template <class V>
    [[gnu::always_inline]] static Scales<V, 1> scales(const Packed&, const Packed&, int, const Factors<V>& of) {
        return {{of.d}, {V::zero()}};
    }
};

// Sub-blocks of 16 columns with signed scales.
template <class V, class Packed>
[[gnu::always_inline]] inline Scales<V, 2> signed_scales(const Packed& a, const Packed& b, int s,
                                                         const Factors<V>& of) {
    return {{V::times(of.d, V::small(a.scale[2 * s], b.scale[2 * s])),
             V::times(of.d, V::small(a.scale[2 * s + 1], b.scale[2 * s + 1]))},
            {V::zero(), V::zero()}};
}

struct Q6_K {
    using Packed = packed::Q6_K;
    static constexpr int kSteps = 8, kParts = 2, kOffset = 32;
    static constexpr bool kHasMin = false;

    template <class V>
    [[gnu::always_inline]] static void unpack(const Packed& a, const Packed& b, int s, typename V::Ints w[8]) {
        unpack_nibbles<V>(a.nibbles[s], b.nibbles[s], w);
        add_two_bits<V, 4>(a.high[s], b.high[s], w);
    }
    template <class V>
    [[gnu::always_inline]] static Scales<V, 2> scales(const Packed& a, const Packed& b, int s, const Factors<V>& of) {
        return signed_scales<V>(a, b, s, of);
    }
};

struct Q3_K {
    using Packed = packed::Q3_K;
    static constexpr int kSteps = 8, kParts = 2, kOffset = 4;
    static constexpr bool kHasMin = false;

    template <class V>
    [[gnu::always_inline]] static void unpack(const Packed& a, const Packed& b, int s, typename V::Ints w[8]) {
        unpack_two_bits<V>(a.low[s], b.low[s], w);
        add_bits<V, 2>(a.high[s], b.high[s], w);
    }
    template <class V>
    [[gnu::always_inline]] static Scales<V, 2> scales(const Packed& a, const Packed& b, int s, const Factors<V>& of) {
        return signed_scales<V>(a, b, s, of);
    }
};

struct Q2_K {
    using Packed = packed::Q2_K;
    static constexpr int kSteps = 8, kParts = 2, kOffset = 0;
    static constexpr bool kHasMin = true;

    template <class V>
    [[gnu::always_inline]] static void unpack(const Packed& a, const Packed& b, int s, typename V::Ints w[8]) {
        unpack_two_bits<V>(a.low[s], b.low[s], w);
    }
    template <class V>
    [[gnu::always_inline]] static Scales<V, 2> scales(const Packed& a, const Packed& b, int s, const Factors<V>& of) {
        Scales<V, 2> out;
        for (int part = 0; part < 2; ++part) {
            uint8_t low[2][kLanes], high[2][kLanes];
            split(a.scale_min[2 * s + part], low[0], high[0]);
            split(b.scale_min[2 * s + part], low[1], high[1]);
            out.scale[part] = V::times(of.d, V::small(low[0], low[1]));
            out.min[part] = V::times(of.minus_dmin, V::small(high[0], high[1]));
        }
        return out;
    }

private:
    static void split(const uint8_t* both, uint8_t* low, uint8_t* high) {
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(both)), mask = _mm_set1_epi8(15);
        _mm_storel_epi64(reinterpret_cast<__m128i*>(low), _mm_and_si128(bytes, mask));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(high), _mm_and_si128(_mm_srli_epi16(bytes, 4), mask));
    }
};

}  // namespace
}  // namespace kvarn::avx512_vnni
