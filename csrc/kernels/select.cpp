// Puts the tables together from the parts of the folders, and picks one: by name, or the best this CPU can run.
#include <cctype>
#include <stdexcept>

#include "cpu.h"
#include "entries.h"

namespace kvarn {
namespace {

// An instruction set: what its folder brings along, on top of the table of its parent.
struct InstructionSet {
    const char* name;
    const InstructionSet* parent;  // null: none
    std::vector<const KernelTable*> parts;
    bool (*is_supported)();
    KernelTable table = assemble();

private:
    KernelTable assemble() const {
        KernelTable whole = parent == nullptr ? KernelTable{} : parent->table;
        whole.name = name;
        for (const KernelTable* part : parts) {
            for (int type = 0; type < kNumTypes; ++type)
                if (part->matmul[type] != nullptr) whole.matmul[type] = part->matmul[type];
#define KVARN_TAKE(entry) \
    if (part->entry != nullptr) whole.entry = part->entry;
            KVARN_ENTRIES(KVARN_TAKE)
#undef KVARN_TAKE
        }
        return whole;
    }
};

const InstructionSet kScalar{
    "scalar",
    nullptr,
    {&scalar::vector_kernels, &scalar::attention_kernels, &scalar::store_kernels, &scalar::matmul_kernels},
    [] { return true; }};
#if defined(__x86_64__)
const InstructionSet kAvx2{"avx2",
                           &kScalar,
                           {&avx2::vector_kernels, &avx2::attention_kernels, &avx2::store_kernels,
                            &avx2::matmul_kernels, &avx2::matmul_float_kernels},
                           cpu_has_avx2_table};
const InstructionSet kAvx512{
    "avx512", &kAvx2, {&avx512::vector_kernels, &avx512::attention_kernels}, cpu_has_avx512_table};
const InstructionSet kAvx512Vnni{"avx512_vnni", &kAvx512, {&avx512_vnni::matmul_kernels}, cpu_has_avx512_vnni_table};
const InstructionSet kAvx512Amx{"avx512_amx", &kAvx512Vnni, {&avx512_amx::matmul_kernels}, cpu_has_avx512_amx_table};
const InstructionSet& kBest = kAvx512Amx;
// The same products with tiles in software, for tests on CPUs that have none: chosen by its name only.
const InstructionSet kAvx512AmxEmulated{
    "avx512_amx_emulated", &kAvx512Vnni, {&avx512_amx_emulated::matmul_kernels}, cpu_has_avx512_bf16_table};
const InstructionSet* const kEmulated = &kAvx512AmxEmulated;
#elif defined(__aarch64__)
const InstructionSet kNeon{"neon",
                           &kScalar,
                           {&neon::vector_kernels, &neon::attention_kernels, &neon::store_kernels,
                            &neon::matmul_kernels, &neon::matmul_float_kernels},
                           cpu_has_neon_table};
const InstructionSet kNeonDot{"neon_dot", &kNeon, {&neon_dot::matmul_kernels}, cpu_has_neon_dot_table};
const InstructionSet kNeonI8mm{"neon_i8mm", &kNeonDot, {&neon_i8mm::matmul_kernels}, cpu_has_neon_i8mm_table};
const InstructionSet& kBest = kNeonI8mm;
const InstructionSet* const kEmulated = nullptr;
#else
const InstructionSet& kBest = kScalar;
const InstructionSet* const kEmulated = nullptr;
#endif

std::string usable_names() {
    std::string names;
    for (const std::string& name : kernel_tables()) names += (names.empty() ? "" : ", ") + name;
    return names;
}

// The set that brought an entry along: the nearest one up the chain whose parent has another.
template <class Entry>
const char* origin(const InstructionSet* set, Entry entry) {
    while (set->parent != nullptr && entry(set->table) == entry(set->parent->table)) set = set->parent;
    return set->name;
}

std::string lower(std::string name) {
    for (char& c : name) c = static_cast<char>(std::tolower(c));
    return name;
}

}  // namespace

std::vector<std::string> kernel_tables() {
    std::vector<std::string> names;
    for (const InstructionSet* set = &kBest; set != nullptr; set = set->parent)
        if (set->is_supported()) names.emplace_back(set->name);
    return names;
}

std::vector<std::string> emulated_tables() {
    if (kEmulated == nullptr || !kEmulated->is_supported()) return {};
    return {kEmulated->name};
}

const KernelTable& select_table(const char* name) {
    const std::string wanted = name;
    for (const std::string& emulated : emulated_tables())
        if (wanted == emulated) return kEmulated->table;
    for (const InstructionSet* set = &kBest; set != nullptr; set = set->parent)
        if ((wanted.empty() || wanted == set->name) && set->is_supported()) return set->table;
    throw std::invalid_argument("kernel table '" + wanted +
                                "' is not one this CPU can run; choose from: " + usable_names());
}

std::map<std::string, std::string> kernel_origins(const std::string& name) {
    const InstructionSet* set = kEmulated != nullptr && name == kEmulated->name ? kEmulated : &kBest;
    while (set != nullptr && name != set->name) set = set->parent;
    if (set == nullptr) throw std::invalid_argument("there is no kernel table '" + name + "' in this build");
    std::map<std::string, std::string> origins;
#define KVARN_MATMUL(type)            \
    origins[lower("matmul_" #type)] = \
        origin(set, [](const KernelTable& t) { return t.matmul[static_cast<int>(Type::type)]; });
    KVARN_FLOAT_TYPES(KVARN_MATMUL)
    KVARN_QUANTIZED_TYPES(KVARN_MATMUL)
#undef KVARN_MATMUL
#define KVARN_ENTRY(entry) \
    if (set->table.entry != nullptr) origins[#entry] = origin(set, [](const KernelTable& t) { return t.entry; });
    KVARN_ENTRIES(KVARN_ENTRY)
#undef KVARN_ENTRY
    return origins;
}

}  // namespace kvarn
