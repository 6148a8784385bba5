// Puts the tables together from the parts of the folders, and picks one: by name, or the best this CPU can run.
#include <cctype>
#include <initializer_list>
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
    bool (*is_permitted)() = [] { return true; };  // asks the system, once, before the first use
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
const InstructionSet kAvx512Amx{
    "avx512_amx", &kAvx512Vnni, {&avx512_amx::matmul_kernels}, cpu_has_avx512_amx_table, ask_for_tiles};
// The same products with tiles in software, for tests on CPUs that have none.
const InstructionSet kAvx512AmxEmulated{
    "avx512_amx_emulated", &kAvx512Vnni, {&avx512_amx_emulated::matmul_kernels}, cpu_has_avx512_bf16_table};
// Best first. Tiles make prompts faster and single tokens slower (docs/performance.md), so they are asked for by name.
const std::initializer_list<const InstructionSet*> kSets{&kAvx512Vnni, &kAvx512Amx, &kAvx512, &kAvx2, &kScalar};
const std::initializer_list<const InstructionSet*> kEmulated{&kAvx512AmxEmulated};
#elif defined(__aarch64__)
const InstructionSet kNeon{"neon",
                           &kScalar,
                           {&neon::vector_kernels, &neon::attention_kernels, &neon::store_kernels,
                            &neon::matmul_kernels, &neon::matmul_float_kernels},
                           cpu_has_neon_table};
const InstructionSet kNeonDot{"neon_dot", &kNeon, {&neon_dot::matmul_kernels}, cpu_has_neon_dot_table};
const InstructionSet kNeonI8mm{"neon_i8mm", &kNeonDot, {&neon_i8mm::matmul_kernels}, cpu_has_neon_i8mm_table};
const std::initializer_list<const InstructionSet*> kSets{&kNeonI8mm, &kNeonDot, &kNeon, &kScalar};
const std::initializer_list<const InstructionSet*> kEmulated{};
#else
const std::initializer_list<const InstructionSet*> kSets{&kScalar};
const std::initializer_list<const InstructionSet*> kEmulated{};
#endif

std::vector<std::string> supported_names(std::initializer_list<const InstructionSet*> sets) {
    std::vector<std::string> names;
    for (const InstructionSet* set : sets)
        if (set->is_supported()) names.emplace_back(set->name);
    return names;
}

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

std::vector<std::string> kernel_tables() { return supported_names(kSets); }

std::vector<std::string> emulated_tables() { return supported_names(kEmulated); }

const KernelTable& select_table(const char* name) {
    const std::string wanted = name;
    for (const InstructionSet* set : kSets)
        if ((wanted.empty() || wanted == set->name) && set->is_supported() && set->is_permitted()) return set->table;
    for (const InstructionSet* set : kEmulated)
        if (wanted == set->name && set->is_supported()) return set->table;
    throw std::invalid_argument("kernel table '" + wanted +
                                "' is not one this CPU can run; choose from: " + usable_names());
}

std::map<std::string, std::string> kernel_origins(const std::string& name) {
    const InstructionSet* set = nullptr;
    for (const auto& sets : {kSets, kEmulated})
        for (const InstructionSet* one : sets)
            if (name == one->name) set = one;
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
