// Eight floats side by side: the same position of eight neighbouring blocks, so that every block is summed in the
// order a plain loop over its values has, and eight of them in one go. Two vectors of four, which every machine has.
#pragma once
#include <cstdint>

namespace kvarn::wide {
namespace {

#define KVARN_WIDE [[gnu::always_inline]] inline

constexpr int kWide = 8;
using Floats4 = float __attribute__((vector_size(16)));
using Ints4 = int32_t __attribute__((vector_size(16)));

struct Ints {
    Ints4 a, b;
    KVARN_WIDE int32_t operator[](int lane) const { return lane < 4 ? a[lane] : b[lane - 4]; }
};

struct Floats {
    Floats4 a, b;
    KVARN_WIDE float operator[](int lane) const { return lane < 4 ? a[lane] : b[lane - 4]; }
    KVARN_WIDE void set(int lane, float value) {
        if (lane < 4) a[lane] = value;
        else b[lane - 4] = value;
    }
};

KVARN_WIDE Floats all(float x) { return {Floats4{x, x, x, x}, Floats4{x, x, x, x}}; }

#define KVARN_ARITHMETIC(op)                                                               \
    KVARN_WIDE Floats operator op(Floats x, Floats y) { return {x.a op y.a, x.b op y.b}; } \
    KVARN_WIDE Floats operator op(Floats x, float y) { return x op all(y); }               \
    KVARN_WIDE Floats operator op(float x, Floats y) { return all(x) op y; }               \
    KVARN_WIDE Floats& operator op## = (Floats & x, Floats y) { return x = x op y; }
KVARN_ARITHMETIC(+)
KVARN_ARITHMETIC(-)
KVARN_ARITHMETIC(*)
KVARN_ARITHMETIC(/)
#undef KVARN_ARITHMETIC

#define KVARN_COMPARISON(op)                                                             \
    KVARN_WIDE Ints operator op(Floats x, Floats y) { return {x.a op y.a, x.b op y.b}; } \
    KVARN_WIDE Ints operator op(Floats x, float y) { return x op all(y); }
KVARN_COMPARISON(<)
KVARN_COMPARISON(>)
KVARN_COMPARISON(<=)
KVARN_COMPARISON(>=)
KVARN_COMPARISON(==)
KVARN_COMPARISON(!=)
#undef KVARN_COMPARISON

KVARN_WIDE Floats operator-(Floats x) { return {-x.a, -x.b}; }
KVARN_WIDE Ints operator&(Ints x, Ints y) { return {x.a & y.a, x.b & y.b}; }

KVARN_WIDE bool any(Ints mask) {
    const Ints4 found = mask.a | mask.b;
    return (found[0] | found[1] | found[2] | found[3]) != 0;
}

KVARN_WIDE Floats choose(Ints mask, Floats yes, Floats no) { return {mask.a ? yes.a : no.a, mask.b ? yes.b : no.b}; }
KVARN_WIDE Floats least(Floats x, Floats y) { return {y.a < x.a ? y.a : x.a, y.b < x.b ? y.b : x.b}; }
KVARN_WIDE Floats most(Floats x, Floats y) { return {y.a > x.a ? y.a : x.a, y.b > x.b ? y.b : x.b}; }
KVARN_WIDE Floats held(Floats x, float low, float high) { return least(most(x, all(low)), all(high)); }
KVARN_WIDE Floats magnitude(Floats x) { return choose(x < 0.0f, -x, x); }

// Without what is behind the point.
KVARN_WIDE Ints cut(Floats x) { return {__builtin_convertvector(x.a, Ints4), __builtin_convertvector(x.b, Ints4)}; }
KVARN_WIDE Floats floats(Ints x) {
    return {__builtin_convertvector(x.a, Floats4), __builtin_convertvector(x.b, Floats4)};
}

// To the nearest whole number, ties to even; exact up to 2^22.
KVARN_WIDE Floats nearest(Floats x) { return (x + 12582912.0f) - 12582912.0f; }

// out[i] holds value i of each of the eight blocks of n values that lie one after another at x.
inline void interleave(const float* x, int n, Floats* out) {
    for (int i = 0; i < n; ++i)
        out[i] = {Floats4{x[i], x[n + i], x[2 * n + i], x[3 * n + i]},
                  Floats4{x[4 * n + i], x[5 * n + i], x[6 * n + i], x[7 * n + i]}};
}

}  // namespace
}  // namespace kvarn::wide
