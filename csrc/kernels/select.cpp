// Picks the kernel table: by name, or the best this CPU can run.
#include <stdexcept>
#include <string>

#include "cpu.h"
#include "table.h"

namespace kvarn {
namespace {

struct Candidate {
    const char* name;
    const KernelTable* table;
    bool (*is_supported)();
};

using Improve = void (*)(KernelTable&) noexcept;

[[maybe_unused]] KernelTable improved(KernelTable table, Improve improve) {
    improve(table);
    return table;
}

#if defined(__x86_64__)
const KernelTable kAvx512 = improved(avx2::table, avx512::improve);
const KernelTable kAvx512Vnni = improved(kAvx512, avx512_vnni::improve);
#elif defined(__aarch64__)
const KernelTable kNeon = improved(scalar::table, neon::improve);
const KernelTable kNeonDot = improved(kNeon, neon_dot::improve);
const KernelTable kNeonI8mm = improved(kNeonDot, neon_i8mm::improve);
#endif

// Best first; the last one runs everywhere.
const Candidate kCandidates[] = {
#if defined(__x86_64__)
    {"avx512_vnni", &kAvx512Vnni, cpu_has_avx512_vnni_table},
    {"avx512", &kAvx512, cpu_has_avx512_table},
    {"avx2", &avx2::table, cpu_has_avx2_table},
#elif defined(__aarch64__)
    {"neon_i8mm", &kNeonI8mm, cpu_has_neon_i8mm_table},
    {"neon_dot", &kNeonDot, cpu_has_neon_dot_table},
    {"neon", &kNeon, cpu_has_neon_table},
#endif
    {"scalar", &scalar::table, [] { return true; }},
};

bool is_usable(const Candidate& candidate) { return candidate.is_supported(); }

std::string usable_names() {
    std::string names;
    for (const std::string& name : kernel_tables()) names += (names.empty() ? "" : ", ") + name;
    return names;
}

}  // namespace

std::vector<std::string> kernel_tables() {
    std::vector<std::string> names;
    for (const Candidate& candidate : kCandidates)
        if (is_usable(candidate)) names.emplace_back(candidate.name);
    return names;
}

const KernelTable& select_table(const char* name) {
    const std::string wanted = name;
    for (const Candidate& candidate : kCandidates)
        if ((wanted.empty() || wanted == candidate.name) && is_usable(candidate)) return *candidate.table;
    throw std::invalid_argument("kernel table '" + wanted +
                                "' is not one this CPU can run; choose from: " + usable_names());
}

}  // namespace kvarn
