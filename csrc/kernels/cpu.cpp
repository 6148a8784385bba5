// CPU features: on x86 by cpuid, counted only when the operating system saves the registers they use; on AArch64 as
// the system reports them.
#include "cpu.h"

#include <cstdint>

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace kvarn {
namespace {

struct Features {
    bool sse42 = false, f16c = false, fma = false, avx = false, avx2 = false;
    bool avx_vnni = false, avx512f = false, avx512bw = false, avx512vl = false, avx512dq = false;
    bool avx512_vnni = false, avx512_vbmi = false;
    bool avx512_bf16 = false, amx_int8 = false, amx_bf16 = false;
    bool neon = false, dotprod = false, i8mm = false;
};

#if defined(__x86_64__) || defined(__i386__)
bool bit(uint32_t word, int position) { return (word >> position & 1u) != 0; }

uint64_t enabled_register_state() {
    uint32_t low = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return static_cast<uint64_t>(high) << 32 | low;
}

constexpr uint64_t kAvxState = 0x6, kAvx512State = 0xe6, kAmxState = 0x60000;

Features detect() {
    Features f;
    uint32_t a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return f;
    f.sse42 = bit(c, 20);
    const bool has_osxsave = bit(c, 27);
    const uint64_t state = has_osxsave ? enabled_register_state() : 0;
    const auto saved = [state](uint64_t mask) { return (state & mask) == mask; };
    f.avx = bit(c, 28) && saved(kAvxState);
    f.fma = bit(c, 12) && f.avx;
    f.f16c = bit(c, 29) && f.avx;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return f;
    f.avx2 = bit(b, 5) && f.avx;
    const bool wide = saved(kAvx512State);
    f.avx512f = bit(b, 16) && wide;
    f.avx512dq = bit(b, 17) && wide;
    f.avx512bw = bit(b, 30) && wide;
    f.avx512vl = bit(b, 31) && wide;
    f.avx512_vbmi = bit(c, 1) && wide;
    f.avx512_vnni = bit(c, 11) && wide;
    f.amx_bf16 = bit(d, 22) && saved(kAmxState);
    f.amx_int8 = bit(d, 25) && saved(kAmxState);
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d)) return f;
    f.avx_vnni = bit(a, 4) && f.avx;
    f.avx512_bf16 = bit(a, 5) && wide;
    return f;
}
#elif defined(__aarch64__) && defined(__linux__)
// Numbers of the kernel's interface (asm/hwcap.h), written out because older headers lack the last.
constexpr unsigned long kAsimd = 1ul << 1, kAsimdDotProduct = 1ul << 20, kInt8Matrix = 1ul << 13;

Features detect() {
    const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
    Features f;
    f.neon = (first & kAsimd) != 0;
    f.dotprod = f.neon && (first & kAsimdDotProduct) != 0;
    f.i8mm = f.neon && (second & kInt8Matrix) != 0;
    return f;
}
#elif defined(__aarch64__)
Features detect() {
    Features f;
    f.neon = true;  // part of every AArch64 system's calling convention; nothing else is asked for here
    return f;
}
#else
Features detect() { return {}; }
#endif

const Features& features() {
    static const Features found = detect();
    return found;
}

}  // namespace

std::vector<std::string> cpu_features() {
    const Features& f = features();
    const struct {
        bool present;
        const char* name;
    } all[] = {{f.sse42, "sse4.2"},
               {f.avx, "avx"},
               {f.f16c, "f16c"},
               {f.fma, "fma"},
               {f.avx2, "avx2"},
               {f.avx_vnni, "avx_vnni"},
               {f.avx512f, "avx512f"},
               {f.avx512bw, "avx512bw"},
               {f.avx512vl, "avx512vl"},
               {f.avx512dq, "avx512dq"},
               {f.avx512_vnni, "avx512_vnni"},
               {f.avx512_vbmi, "avx512_vbmi"},
               {f.avx512_bf16, "avx512_bf16"},
               {f.amx_int8, "amx_int8"},
               {f.amx_bf16, "amx_bf16"},
               {f.neon, "neon"},
               {f.dotprod, "dotprod"},
               {f.i8mm, "i8mm"}};
    std::vector<std::string> names;
    for (const auto& feature : all)
        if (feature.present) names.emplace_back(feature.name);
    return names;
}

bool cpu_has_avx2_table() {
    const Features& f = features();
    return f.avx2 && f.fma && f.f16c;
}

bool cpu_has_avx512_table() {
    const Features& f = features();
    return cpu_has_avx2_table() && f.avx512f && f.avx512bw && f.avx512vl && f.avx512dq;
}

bool cpu_has_avx512_vnni_table() { return cpu_has_avx512_table() && features().avx512_vnni; }

bool cpu_has_avx512_bf16_table() {
    return cpu_has_avx512_vnni_table() && features().avx512_bf16 && features().avx512_vbmi;
}

bool cpu_has_avx512_amx_table() { return cpu_has_avx512_bf16_table() && features().amx_bf16; }

// Not before they are wanted: from then on a handler of signals needs 8 KiB more on its stack.
bool ask_for_tiles() {
#if defined(__x86_64__) && defined(__linux__) && defined(SYS_arch_prctl)
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // asm/prctl.h and the number of the register state
    static const bool is_permitted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return is_permitted;
#else
    return false;
#endif
}

bool cpu_has_neon_table() { return features().neon; }

bool cpu_has_neon_dot_table() { return cpu_has_neon_table() && features().dotprod; }

bool cpu_has_neon_i8mm_table() { return cpu_has_neon_dot_table() && features().i8mm; }

}  // namespace kvarn
