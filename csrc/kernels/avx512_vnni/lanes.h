// The same operations on one row group (8 lanes) and on two neighbouring ones (16 lanes).
// b is ignored by Eight; with Sixteen it is the second group's address.
#pragma once
#include <immintrin.h>

#include "../table.h"

namespace kvarn::avx512_vnni {
namespace {

struct Eight {
    using Ints = __m256i;
    using Floats = __m256;
    static constexpr int kGroups = 1;

    static Ints load(const void* a, const void*) { return _mm256_loadu_si256(static_cast<const __m256i*>(a)); }
    static Ints bytes(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }
    static Ints words(int value) { return _mm256_set1_epi32(value); }
    static Ints both(Ints x, Ints y) { return _mm256_and_si256(x, y); }
    static Ints either(Ints x, Ints y) { return _mm256_or_si256(x, y); }
    static Ints differ(Ints x, Ints y) { return _mm256_xor_si256(x, y); }
    static Ints up(Ints x, int places) { return _mm256_slli_epi16(x, places); }
    static Ints down(Ints x, int places) { return _mm256_srli_epi16(x, places); }
    static Ints look_up(__m128i table, Ints x) { return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), x); }
    static Ints sum(Ints x, Ints y) { return _mm256_add_epi32(x, y); }
    template <int kFactor>  // a power of two
    static Ints scaled_up(Ints x) {
        return _mm256_slli_epi32(x, __builtin_ctz(kFactor));
    }
    static Ints dot(Ints sum, Ints unsigned_bytes, Ints signed_bytes) {
        return _mm256_dpbusd_epi32(sum, unsigned_bytes, signed_bytes);
    }
    static Floats halves(const uint16_t* a, const uint16_t*) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a)));
    }
    static Floats small(const uint8_t* a, const uint8_t*) {
        return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(a))));
    }
    static Floats small(const int8_t* a, const int8_t*) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(a))));
    }
    static Floats zero() { return _mm256_setzero_ps(); }
    static Floats all(float value) { return _mm256_set1_ps(value); }
    static Floats floats(Ints x) { return _mm256_cvtepi32_ps(x); }
    static Floats times(Floats x, Floats y) { return _mm256_mul_ps(x, y); }
    static Floats add_product(Floats x, Floats y, Floats sum) { return _mm256_fmadd_ps(x, y, sum); }
    static void store(float* out, Floats x, int count) {
        _mm256_mask_storeu_ps(out, static_cast<__mmask8>((1u << count) - 1), x);
    }
};

struct Sixteen {
    using Ints = __m512i;
    using Floats = __m512;
    static constexpr int kGroups = 2;

    static Ints load(const void* a, const void* b) {
        return _mm512_inserti64x4(_mm512_castsi256_si512(Eight::load(a, nullptr)), Eight::load(b, nullptr), 1);
    }
    static Ints bytes(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }
    static Ints words(int value) { return _mm512_set1_epi32(value); }
    static Ints both(Ints x, Ints y) { return _mm512_and_si512(x, y); }
    static Ints either(Ints x, Ints y) { return _mm512_or_si512(x, y); }
    static Ints differ(Ints x, Ints y) { return _mm512_xor_si512(x, y); }
    // The counts of these instructions are part of them, also where nothing is inlined.
    static Ints up(Ints x, int places) {
        switch (places) {
            case 1: return _mm512_slli_epi16(x, 1);
            case 2: return _mm512_slli_epi16(x, 2);
            case 3: return _mm512_slli_epi16(x, 3);
            case 4: return _mm512_slli_epi16(x, 4);
            case 5: return _mm512_slli_epi16(x, 5);
            case 6: return _mm512_slli_epi16(x, 6);
            case 7: return _mm512_slli_epi16(x, 7);
            default: return x;
        }
    }
    static Ints down(Ints x, int places) {
        switch (places) {
            case 1: return _mm512_srli_epi16(x, 1);
            case 2: return _mm512_srli_epi16(x, 2);
            case 3: return _mm512_srli_epi16(x, 3);
            case 4: return _mm512_srli_epi16(x, 4);
            case 5: return _mm512_srli_epi16(x, 5);
            case 6: return _mm512_srli_epi16(x, 6);
            case 7: return _mm512_srli_epi16(x, 7);
            default: return x;
        }
    }
    static Ints look_up(__m128i table, Ints x) { return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), x); }
    static Ints sum(Ints x, Ints y) { return _mm512_add_epi32(x, y); }
    template <int kFactor>  // a power of two
    static Ints scaled_up(Ints x) {
        return _mm512_slli_epi32(x, __builtin_ctz(kFactor));
    }
    static Ints dot(Ints sum, Ints unsigned_bytes, Ints signed_bytes) {
        return _mm512_dpbusd_epi32(sum, unsigned_bytes, signed_bytes);
    }
    static Floats halves(const uint16_t* a, const uint16_t* b) {
        return _mm512_cvtph_ps(_mm256_set_m128i(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b)), load16(a)));
    }
    static Floats small(const uint8_t* a, const uint8_t* b) {
        return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(eight_and_eight(a, b)));
    }
    static Floats small(const int8_t* a, const int8_t* b) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(eight_and_eight(a, b)));
    }
    static Floats zero() { return _mm512_setzero_ps(); }
    static Floats all(float value) { return _mm512_set1_ps(value); }
    static Floats floats(Ints x) { return _mm512_cvtepi32_ps(x); }
    static Floats times(Floats x, Floats y) { return _mm512_mul_ps(x, y); }
    static Floats add_product(Floats x, Floats y, Floats sum) { return _mm512_fmadd_ps(x, y, sum); }
    static void store(float* out, Floats x, int count) {
        _mm512_mask_storeu_ps(out, static_cast<__mmask16>((1u << count) - 1), x);
    }

private:
    static __m128i load16(const void* at) { return _mm_loadu_si128(static_cast<const __m128i*>(at)); }
    static __m128i eight_and_eight(const void* a, const void* b) {
        return _mm_unpacklo_epi64(_mm_loadl_epi64(static_cast<const __m128i*>(a)),
                                  _mm_loadl_epi64(static_cast<const __m128i*>(b)));
    }
};

}  // namespace
}  // namespace kvarn::avx512_vnni
