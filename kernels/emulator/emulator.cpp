// Runs PTX of Hopper kernels on a CPU: correctness, not time.
//
// A launch comes from the kernel's own host code (stub.c). Threads are simulated in warps of 32 lanes with one program
// counter each: the lanes that are furthest behind run first, which is where branches meet again. Warps of several
// thread blocks take turns in random order for random numbers of instructions. What the hardware does on its own time
// is done here at a random time between what starts it and what waits for it: TMA and cp.async copies in any order,
// tensor-core products in theirs. Until then the destination holds NaNs: whoever reads it early, or reads what a copy
// is about to replace, gets them. Shared memory and registers begin as NaNs as well.
//
// Faults end the launch with a message: accesses outside of the arguments' memory or of shared memory, misaligned ones,
// deadlock, too many arrivals, shared memory that the tensor cores or a copy read without a proxy fence, and, if asked
// for, races on shared memory between warps (vector clocks).
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

using u8 = uint8_t; using u16 = uint16_t; using u32 = uint32_t; using u64 = uint64_t;
using i8 = int8_t; using i16 = int16_t; using i32 = int32_t; using i64 = int64_t; using f32 = float; using f64 = double;
using Half = _Float16;
using std::string; using std::vector;

static string format(const char* text, auto... values) {
    char out[4096];
    snprintf(out, sizeof out, text, values...);
    return out;
}
struct Fault : std::runtime_error { using std::runtime_error::runtime_error; };
#define FAIL(...) throw Fault(format(__VA_ARGS__))

template <class To, class From> static To bits(From x) { To y; static_assert(sizeof x == sizeof y); memcpy(&y, &x, sizeof y); return y; }
static f32 from_bf16(u16 h) { return bits<f32>(u32(h) << 16); }
static u16 to_bf16(f32 x) {
    u32 u = bits<u32>(x);
    if (x != x) return 0x7fff;
    return u16((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
static f32 from_half(u16 h) { return f32(bits<Half>(h)); }
static u16 to_half(f32 x) { return x != x ? u16(0x7fff) : bits<u16>(Half(x)); }

// ---------------------------------------------------------------------------------------------------- program

constexpr u64 SHARED_WINDOW = 1ull << 62, LOCAL_WINDOW = 1ull << 61;
constexpr int SHARED_SIZE = 232448;  // of a thread block, 227 KiB
constexpr u32 DYNAMIC_BASE = 1024;   // the system's own 1 KiB lies before it

enum class Kind { none, pred, reg, vec, mem };
struct Operand {
    Kind kind = Kind::none;
    i32 at = -1;      // byte offset in the warp's registers, or number of a predicate; -1: a sink
    i32 width = 4;    // bytes of a register
    bool negated = false;
    i32 second = -1;  // of a|b
    i32 second_kind = 0;  // 0 register, 1 predicate
    i64 offset = 0;   // of an address
    vector<Operand> parts;
};

struct Warp;
struct Instruction;
enum Result { NEXT, BLOCKED, YIELD };  // BLOCKED: try again later; YIELD: done, but let others run
using Action = Result (*)(Warp&, const Instruction&, u32 mask);

enum class Flow { plain, branch, leave };
struct Instruction {
    Action act = nullptr;
    Flow flow = Flow::plain;
    i32 guard = -1;
    bool guard_negated = false;
    i32 target = -1;
    u32 a = 0, b = 0, c = 0, d = 0;  // what an action needs to know, decided when decoding
    i64 n = 0;
    vector<Operand> o;
    string text;
};

struct Parameter { string name; u32 offset, size; };
struct Fixup { i32 at; i32 width; int what; u64 offset; };  // register rows that are filled at launch
enum { FIX_PARAM, FIX_TID, FIX_NTID, FIX_CTAID, FIX_NCTAID, FIX_LANE, FIX_WARP, FIX_SMEM_SIZE, FIX_LANEMASK };

struct Program {
    string name;
    vector<Parameter> parameters;
    u32 parameter_bytes = 0, static_shared = 0, local_bytes = 0;
    vector<Instruction> code;
    vector<u8> image;        // registers as a warp starts: poison, constants
    vector<u32> predicates;  // the same of predicates
    vector<Fixup> fixups;
};

struct Launch;
struct Decoder;
static bool decode(Decoder&, Instruction&, const string& op, const vector<string>& args);

struct Symbol { Kind kind; i32 at; i32 width; };
struct Decoder {
    Program& p;
    explicit Decoder(Program& program) : p(program) {}
    vector<std::map<string, Symbol>> scopes{1};
    std::map<string, u32> shared, local, params;
    std::map<std::pair<u64, int>, i32> constants;
    std::map<std::pair<int, u64>, i32> fixed;
    vector<std::tuple<int, string, vector<int>>> branches;    // instruction, label, scopes
    std::map<std::pair<string, int>, int> labels;
    vector<int> path{0};

    i32 row(int width, u64 fill) {
        while (p.image.size() % (32 * width)) p.image.push_back(0);
        i32 at = i32(p.image.size());
        for (int i = 0; i < 32; i++) for (int b = 0; b < width; b++) p.image.push_back(u8(fill >> (8 * b)));
        return at;
    }
    i32 constant(u64 value, int width) {
        if (width < 8) value &= (1ull << (8 * width)) - 1;
        auto [it, fresh] = constants.try_emplace({value, width}, 0);
        if (fresh) it->second = row(width, value);
        return it->second;
    }
    i32 fix(int what, u64 offset, int width) {
        auto [it, fresh] = fixed.try_emplace({what * 16 + width, offset}, 0);
        if (fresh) { it->second = row(width, 0); p.fixups.push_back({it->second, width, what, offset}); }
        return it->second;
    }
    i32 predicate(u32 start) { p.predicates.push_back(start); return i32(p.predicates.size()) - 1; }

    void declare(const string& text) {  // ".reg .b32 %r<10>" or ".reg .pred p, q"
        size_t dot = text.find('.', 1), space = text.find_first_of(" \t", dot);
        string type = text.substr(dot, space - dot), names = text.substr(space);
        int width = type.find("64") != string::npos ? 8 : type.find("16") != string::npos && type.find("x2") == string::npos ? 2
                    : type.find("8") != string::npos && type.size() <= 3 ? 2 : 4;
        bool pred = type == ".pred";
        size_t at = 0;
        while (at < names.size()) {
            size_t end = names.find(',', at);
            if (end == string::npos) end = names.size();
            string name = names.substr(at, end - at);
            at = end + 1;
            auto strip = [](string s) { size_t a = s.find_first_not_of(" \t\n\r"), b = s.find_last_not_of(" \t\n\r"); return a == string::npos ? string() : s.substr(a, b - a + 1); };
            name = strip(name);
            int count = -1;
            if (size_t angle = name.find('<'); angle != string::npos) { count = atoi(name.c_str() + angle + 1); name = name.substr(0, angle); }
            for (int i = 0; i < (count < 0 ? 1 : count); i++) {
                string full = count < 0 ? name : name + std::to_string(i);
                scopes.back()[full] = pred ? Symbol{Kind::pred, predicate(0x5a5a5a5a), 0} : Symbol{Kind::reg, row(width, ~0ull), width};
            }
        }
    }
    const Symbol* find(const string& name) {
        for (size_t i = scopes.size(); i--;) if (auto it = scopes[i].find(name); it != scopes[i].end()) return &it->second;
        return nullptr;
    }
    // `width` is that of the instruction's type: constants are made for it.
    Operand operand(string s, int width) {
        Operand o;
        if (s.empty()) FAIL("empty operand");
        if (s[0] == '{') {
            o.kind = Kind::vec;
            for (auto& part : split(s.substr(1, s.size() - 2))) o.parts.push_back(operand(part, width));
            return o;
        }
        if (s[0] == '[') {
            s = s.substr(1, s.size() - 2);
            auto parts = split(s);
            string base = parts[0];
            o.kind = Kind::mem;
            size_t plus = base.find_last_of("+-");
            if (plus != string::npos && plus > 0) {
                string tail = base.substr(plus + 1);
                o.offset = strtoll(tail.c_str(), nullptr, 0) * (base[plus] == '-' ? -1 : 1);
                base = base.substr(0, plus);
            }
            while (!base.empty() && (base.back() == ' ' || base.back() == '+')) base.pop_back();
            Operand inner = operand(base, 8);
            o.at = inner.at; o.width = inner.width;
            for (size_t i = 1; i < parts.size(); i++) o.parts.push_back(operand(parts[i], 4));
            return o;
        }
        if (size_t bar = s.find('|'); bar != string::npos) {
            o = operand(s.substr(0, bar), width);
            Operand second = operand(s.substr(bar + 1), width);
            o.second = second.at; o.second_kind = second.kind == Kind::pred;
            return o;
        }
        if (s == "_") { o.kind = Kind::reg; o.width = width; return o; }
        if (s[0] == '!') { o = operand(s.substr(1), width); o.negated = true; return o; }
        if (const Symbol* symbol = find(s)) { o.kind = symbol->kind; o.at = symbol->at; o.width = symbol->width; return o; }
        o.kind = Kind::reg; o.width = width;
        if (s[0] == '%') {
            static const std::map<string, std::pair<int, int>> specials = {
                {"%tid.x", {FIX_TID, 0}}, {"%tid.y", {FIX_TID, 1}}, {"%tid.z", {FIX_TID, 2}}, {"%ntid.x", {FIX_NTID, 0}}, {"%ntid.y", {FIX_NTID, 1}},
                {"%ntid.z", {FIX_NTID, 2}}, {"%ctaid.x", {FIX_CTAID, 0}}, {"%ctaid.y", {FIX_CTAID, 1}}, {"%ctaid.z", {FIX_CTAID, 2}},
                {"%nctaid.x", {FIX_NCTAID, 0}}, {"%nctaid.y", {FIX_NCTAID, 1}}, {"%nctaid.z", {FIX_NCTAID, 2}}, {"%laneid", {FIX_LANE, 0}},
                {"%warpid", {FIX_WARP, 0}}, {"%dynamic_smem_size", {FIX_SMEM_SIZE, 0}}, {"%lanemask_eq", {FIX_LANEMASK, 0}}, {"%lanemask_lt", {FIX_LANEMASK, 1}},
                {"%lanemask_le", {FIX_LANEMASK, 2}}, {"%lanemask_gt", {FIX_LANEMASK, 3}}, {"%lanemask_ge", {FIX_LANEMASK, 4}},
            };
            if (s.rfind("%cluster_ctaid", 0) == 0 || s.rfind("%cluster_ctarank", 0) == 0) { o.at = constant(0, width); return o; }
            auto it = specials.find(s);
            if (it == specials.end()) FAIL("register %s", s.c_str());
            o.width = 4; o.at = fix(it->second.first, it->second.second, 4);
            return o;
        }
        if (auto it = params.find(s); it != params.end()) { o.width = 8; o.at = fix(FIX_PARAM, it->second, 8); return o; }
        if (auto it = shared.find(s); it != shared.end()) { o.at = constant(it->second, width); return o; }
        if (auto it = local.find(s); it != local.end()) { o.at = constant(it->second, width); return o; }
        if (s[0] == '0' && (s[1] == 'f' || s[1] == 'F') && s.size() == 10) { o.at = constant(strtoull(s.c_str() + 2, nullptr, 16), width); return o; }
        if (s[0] == '0' && (s[1] == 'd' || s[1] == 'D') && s.size() == 18) { o.at = constant(strtoull(s.c_str() + 2, nullptr, 16), width); return o; }
        if (isdigit(s[0]) || s[0] == '-') {
            u64 value = s[0] == '-' ? u64(strtoll(s.c_str(), nullptr, 0)) : strtoull(s.c_str(), nullptr, 0);
            o.at = constant(value, width);
            o.offset = i64(value);
            return o;
        }
        FAIL("operand %s", s.c_str());
    }
    Operand pred(const string& s) {
        if (isdigit(s[0]) || s[0] == '-') { Operand o; o.kind = Kind::pred; o.at = predicate(atoi(s.c_str()) ? ~0u : 0); return o; }
        return operand(s, 4);
    }
    static vector<string> split(const string& s) {
        vector<string> out;
        int depth = 0;
        string part;
        for (char c : s) {
            if (c == '{' || c == '[' || c == '(') depth++;
            if (c == '}' || c == ']' || c == ')') depth--;
            if (c == ',' && !depth) { out.push_back(part); part.clear(); }
            else if (!isspace(c)) part += c;
        }
        if (!part.empty()) out.push_back(part);
        return out;
    }

    void statement(string s) {
        if (s[0] == '.') {
            if (s.rfind(".reg", 0) == 0) declare(s);
            else if (s.rfind(".shared", 0) == 0 || s.rfind(".local", 0) == 0) memory(s);
            return;
        }
        Instruction in;
        in.text = s;
        if (s[0] == '@') {
            size_t end = s.find_first_of(" \t");
            string guard = s.substr(1, end - 1);
            if (guard[0] == '!') { in.guard_negated = true; guard = guard.substr(1); }
            Operand o = operand(guard, 4);
            if (o.kind != Kind::pred) FAIL("guard %s", guard.c_str());
            in.guard = o.at;
            s = s.substr(s.find_first_not_of(" \t", end));
        }
        size_t end = s.find_first_of(" \t\n");
        string op = s.substr(0, end);
        vector<string> args = end == string::npos ? vector<string>() : split(s.substr(end));
        if (op == "bra" || op == "bra.uni") { in.flow = Flow::branch; branches.push_back({int(p.code.size()), args[0], path}); }
        else if (op == "ret" || op == "exit") in.flow = Flow::leave;
        else {
            try { if (!decode(*this, in, op, args)) FAIL("instruction unknown to the emulator"); }
            catch (const Fault& fault) { FAIL("%s: %s", s.substr(0, 300).c_str(), fault.what()); }
        }
        p.code.push_back(std::move(in));
    }
    void memory(const string& s) {  // ".shared .align 16 .b8 name[64]"
        size_t align_at = s.find(".align");
        u32 align = align_at == string::npos ? 4 : u32(atoi(s.c_str() + align_at + 6));
        size_t bracket = s.find('[');
        size_t name_at = s.find_last_of(" \t", bracket == string::npos ? s.size() : bracket) + 1;
        string name = s.substr(name_at, (bracket == string::npos ? s.size() : bracket) - name_at);
        u32 count = bracket == string::npos ? 1 : u32(atoi(s.c_str() + bracket + 1));
        u32 unit = s.find("64 ") != string::npos ? 8 : s.find("32 ") != string::npos ? 4 : s.find("16 ") != string::npos && s.find(".b16") != string::npos ? 2 : 1;
        if (s.rfind(".local", 0) == 0) {
            p.local_bytes = (p.local_bytes + align - 1) / align * align;
            local[name] = p.local_bytes;
            p.local_bytes += count * unit;
        } else {
            p.static_shared = (p.static_shared + align - 1) / align * align;
            shared[name] = DYNAMIC_BASE + p.static_shared;
            p.static_shared += count * unit;
        }
    }
};

static string strip_comments(const string& text) {
    string out;
    for (size_t i = 0; i < text.size(); i++) {
        if (text[i] == '/' && i + 1 < text.size() && text[i + 1] == '/') { while (i < text.size() && text[i] != '\n') i++; out += '\n'; }
        else if (text[i] == '/' && i + 1 < text.size() && text[i + 1] == '*') { i = text.find("*/", i) + 1; }
        else out += text[i];
    }
    return out;
}

static vector<std::unique_ptr<Program>> parse(const string& source) {
    string text = strip_comments(source);
    vector<std::unique_ptr<Program>> out;
    vector<std::pair<string, bool>> global_memory;  // declarations before the functions; extern ones are the dynamic memory
    size_t at = 0;
    for (size_t shared_at = text.find(".shared"); shared_at != string::npos && shared_at < text.find(".entry"); shared_at = text.find(".shared", shared_at + 1)) {
        size_t line = text.rfind('\n', shared_at) + 1;
        bool external = text.substr(line, shared_at - line).find(".extern") != string::npos;
        global_memory.push_back({text.substr(shared_at, text.find(';', shared_at) - shared_at), external});
    }
    while ((at = text.find(".entry", at)) != string::npos) {
        auto program = std::make_unique<Program>();
        Decoder d(*program);
        size_t open = text.find('(', at), close = text.find(')', at);
        string name = text.substr(at + 6, open - at - 6);
        name.erase(remove_if(name.begin(), name.end(), ::isspace), name.end());
        program->name = name;
        for (auto& parameter : Decoder::split(text.substr(open + 1, close - open - 1))) {
            // Without its blanks: ".param.align64.b8name[128]" or ".param.u32name".
            size_t start = parameter.find(name.substr(0, 20));
            string head = parameter.substr(0, start), own = parameter.substr(start);
            size_t align_at = head.find(".align");
            u32 size = head.find("64") != string::npos && align_at == string::npos ? 8 : head.find("16") != string::npos && align_at == string::npos ? 2 : head.find("8") != string::npos && align_at == string::npos ? 1 : 4;
            u32 align = align_at == string::npos ? size : u32(atoi(head.c_str() + align_at + 6));
            if (size_t bracket = own.find('['); bracket != string::npos) { size = u32(atoi(own.c_str() + bracket + 1)); own = own.substr(0, bracket); }
            program->parameter_bytes = (program->parameter_bytes + align - 1) / align * align;
            program->parameters.push_back({own, program->parameter_bytes, size});
            d.params[own] = program->parameter_bytes;
            program->parameter_bytes += size;
        }
        vector<string> dynamic;
        for (auto& [declaration, external] : global_memory) {
            if (external) { size_t bracket = declaration.find('['), s = declaration.find_last_of(" \t", bracket) + 1; dynamic.push_back(declaration.substr(s, bracket - s)); }
            else d.memory(declaration);
        }
        for (auto& one : dynamic) d.shared[one] = DYNAMIC_BASE;  // moved behind static memory below
        at = text.find('{', close) + 1;
        string piece;
        int vectors = 0, next_scope = 1;
        for (bool inside = true; inside; at++) {
            char c = text[at];
            bool blank = piece.find_first_not_of(" \t\n\r") == string::npos;
            if (c == '{') {
                if (blank) { d.scopes.emplace_back(); d.path.push_back(next_scope++); piece.clear(); }
                else { vectors++; piece += c; }
            } else if (c == '}') {
                if (vectors) { vectors--; piece += c; }
                else if (d.scopes.size() > 1) { d.scopes.pop_back(); d.path.pop_back(); piece.clear(); }
                else inside = false;
            } else if (c == ';') {
                size_t a = piece.find_first_not_of(" \t\n\r"), b = piece.find_last_not_of(" \t\n\r");
                if (a != string::npos) d.statement(piece.substr(a, b - a + 1));
                piece.clear();
            } else if (c == ':' && text[at + 1] != ':' && !blank && text[at - 1] != ':') {
                string label = piece.substr(piece.find_first_not_of(" \t\n\r"));
                if (label.find_first_of(" \t[.") == string::npos) { d.labels[{label, d.path.back()}] = int(program->code.size()); piece.clear(); }
                else piece += c;
            } else piece += c;
        }
        for (auto& [index, label, path] : d.branches) {
            int target = -1;
            for (size_t i = path.size(); i-- && target < 0;) if (auto it = d.labels.find({label, path[i]}); it != d.labels.end()) target = it->second;
            if (target < 0) FAIL("label %s", label.c_str());
            program->code[index].target = target;
        }
        Instruction end;
        end.flow = Flow::leave; end.text = "(end)";
        program->code.push_back(end);
        out.push_back(std::move(program));
    }
    return out;
}

// ---------------------------------------------------------------------------------------------------- machine

struct Barrier {
    i64 expected = 0, pending = 0, transactions = 0; u64 phase = 0; bool valid = false;
    i32 agent = 0;
};

constexpr int WARPS = 32, AGENTS = 72;  // warps of a thread block, then barriers: the copies that complete on them
struct Clock {
    u32 at[AGENTS] = {};
    void join(const Clock& other) { for (int i = 0; i < AGENTS; i++) at[i] = std::max(at[i], other.at[i]); }
};
struct Shadow {  // of a 4-byte word of shared memory
    u32 written = 0; u16 writer = 0xffff;
    u32 read[AGENTS] = {};
};

struct TensorMap { u8* base; int rank, size, swizzle; i64 dims[5], strides[5]; int box[5]; };

static TensorMap read_map(const u8* raw) {
    // The hardware's own format, as the compiled host code writes it.
    u64 w[16];
    memcpy(w, raw, 128);
    TensorMap m{};
    u32 flags = u32(w[1]);
    m.base = reinterpret_cast<u8*>(w[0]);
    m.rank = int(flags >> 4 & 7) + 1;
    switch (flags >> 7 & 15) {
        case 10: case 6: m.size = 2; break;  // bf16, fp16
        default: FAIL("tensor map: data type %u", flags >> 7 & 15);
    }
    if ((flags & ~0x200070u & ~0x6780u) != 0x40002u) FAIL("tensor map: flags %x", flags);
    m.swizzle = int(flags >> 13 & 3);
    m.strides[0] = m.size;
    u32 strides[4] = {u32(w[1] >> 32), u32(w[2]), u32(w[2] >> 32), u32(w[3])};
    u32 dims[5] = {u32(w[4]), u32(w[4] >> 32), u32(w[5]), u32(w[5] >> 32), u32(w[6])};
    for (int i = 0; i < m.rank; i++) {
        m.dims[i] = i64(dims[i]) + 1;
        if (i) m.strides[i] = i64(strides[i - 1]) * 16;
        m.box[i] = int(i ? w[7] >> (8 * (i - 1)) & 255 : w[6] >> 56) + 1;
    }
    if (w[6] >> 32 & 0xffffff) FAIL("tensor map: strides of elements");
    return m;
}

static u32 swizzled(u32 address, int mode) {  // 3: 128 bytes, 2: 64, 1: 32
    return mode ? address ^ (address >> 3 & ((1u << mode) - 1) << 4) : address;
}

struct Cta;
struct Copy {  // TMA: from global to shared memory
    Cta* cta; int warp, lane;
    u32 to, barrier;
    TensorMap map; i32 coordinates[5];
    u8* plain = nullptr; u32 bytes = 0;  // a piece of memory instead of a tensor's box
    Clock clock;
};
struct LaneCopy { u32 to; u64 from; u32 size, filled; int lane; };
struct AsyncCopies {  // one cp.async instruction of a warp, or, without copies, an arrival once those before are done
    u64 number; i64 group; vector<LaneCopy> copies; vector<std::pair<int, u32>> arrivals;
};

struct Product;
struct Accumulator { vector<i32> rows; int columns; vector<f32> c; int pending = 0; };
struct Product {
    const Instruction* in; std::shared_ptr<Accumulator> to; bool add;
    u64 a = 0, b = 0; i64 group;
    u32 words[4][32];  // A, if it is in registers: nobody may change them before the product has been waited for
};

struct Warp {
    Launch* launch; Cta* cta; const Program* program; int index;
    u32 live = ~0u, active = ~0u, waiting = 0;
    i32 pc = 0, pcs[32] = {};
    vector<u8> registers; vector<u32> predicates; vector<u8> local;
    i64 barrier_generation = -1; int barrier_id = -1;
    std::deque<Product> products, finished;  // not begun; done, but not waited for
    i64 product_group = 0;
    vector<std::shared_ptr<Accumulator>> accumulators;
    std::deque<AsyncCopies> copies; i64 copy_group = 0;
    u64 fences[32] = {};
    bool polling = false;  // since a barrier was found not to be over, it has done nothing but branch
    Clock clock;
    template <class T> T* row(i32 at) { return reinterpret_cast<T*>(registers.data() + at); }
    template <class T> const T* row(const Operand& o) { return reinterpret_cast<const T*>(registers.data() + o.at); }
    u32 pred(const Operand& o) { return o.negated ? ~predicates[o.at] : predicates[o.at]; }
    void set(i32 at, u32 mask, u32 value) { if (at >= 0) predicates[at] = (predicates[at] & ~mask) | (value & mask); }
    u64 get(const Operand& o, int lane) {
        switch (o.width) { case 2: return row<u16>(o)[lane]; case 4: return row<u32>(o)[lane]; default: return row<u64>(o)[lane]; }
    }
    i64 get_signed(const Operand& o, int lane) {
        switch (o.width) { case 2: return row<i16>(o)[lane]; case 4: return row<i32>(o)[lane]; default: return row<i64>(o)[lane]; }
    }
    void put(const Operand& o, int lane, u64 value) {
        if (o.at < 0) return;
        switch (o.width) { case 2: row<u16>(o.at)[lane] = u16(value); break; case 4: row<u32>(o.at)[lane] = u32(value); break; default: row<u64>(o.at)[lane] = value; }
    }
    u64 address(const Operand& o, int lane) { return get(o, lane) + u64(o.offset); }
    int run(int budget);
    bool choose();
    void execute_product();
    void execute_copies(size_t index);
    void release();
};

struct NamedBarrier { i64 arrived = 0, generation = 0; Clock gathering, ready; };

struct Cta {
    Launch* launch; u32 id[3];
    vector<u8> shared;
    vector<Barrier> barriers; i32 agents = 0;
    std::map<u32, std::pair<Clock, Clock>> clocks;  // of barriers: what arrivals of this phase bring, and what those of the last ones brought
    vector<u32> writer; vector<u64> written;  // of 16 bytes: the thread + 1 that wrote them by ordinary stores, and when
    vector<Shadow> shadow;
    NamedBarrier named[16];
    vector<std::unique_ptr<Warp>> warps;
    vector<Copy> copies;
    u32 copy_clock = 0;
    void arrive(u32 at, const Clock& clock) { if (races()) clocks[at].first.join(clock); }
    bool races() const;
    void check(u32 at, u32 size) const;
    void read(Warp& w, u32 at, u32 size);
    void write(Warp& w, int lane, u32 at, u32 size);
    void touch(int agent, const Clock& clock, u32 at, u32 size, bool writes, const char* who);
    void proxy(Warp& w, u32 at, u32 size);
    Barrier& barrier(u32 at) {
        if (at % 8 || at / 8 >= barriers.size() || !barriers[at / 8].valid) FAIL("no mbarrier at %u", at);
        return barriers[at / 8];
    }
    void settle(u32 at) {
        Barrier& b = barrier(at);
        if (b.pending < 0) FAIL("more arrivals on an mbarrier than its count of %ld", long(b.expected));
        if (b.pending || b.transactions) return;
        b.phase++;
        b.pending = b.expected;
        if (races()) { auto& [gathering, ready] = clocks[at]; ready.join(gathering); }
    }
    void land(size_t index);
};

struct Options { u64 seed; i64 resident, steps; i32 races, proxies, trace; };
struct Range { u64 begin, end; };

struct Launch {
    const Program& program;
    u32 grid[3], block[3], dynamic;
    vector<u8> storage; u8* parameters;
    vector<Range> ranges;
    Options options;
    std::mt19937_64 random;
    u64 time = 1, steps = 0;
    int haste = 30;  // percent: how soon copies and products are done
    size_t last = 0;
    vector<std::unique_ptr<Cta>> resident;
    explicit Launch(const Program& p) : program(p) {}
    u32 below(u32 n) { return u32(random() % n); }
    u8* global(u64 address, u32 size) {
        if (address % size) FAIL("global address %lx is not aligned to %u bytes", long(address), size);
        if (last < ranges.size() && address >= ranges[last].begin && address + size <= ranges[last].end) return reinterpret_cast<u8*>(address);
        for (size_t i = 0; i < ranges.size(); i++)
            if (address >= ranges[i].begin && address + size <= ranges[i].end) { last = i; return reinterpret_cast<u8*>(address); }
        u64 near = 0, best = ~0ull;
        for (auto& r : ranges) { u64 distance = address < r.begin ? r.begin - address : address - r.end; if (distance < best) { best = distance; near = r.begin; } }
        FAIL("global access of %u bytes is outside of every argument (%ld bytes from the nearest's begin)", size, long(address - near));
    }
    std::unique_ptr<Cta> start(u64 number);
    void run();
};

bool Cta::races() const { return launch->options.races; }
void Cta::check(u32 at, u32 size) const {
    if (at % size) FAIL("shared address %u is not aligned to %u bytes", at, size);
    if (at < DYNAMIC_BASE || u64(at) + size > shared.size()) FAIL("shared address %u is outside of the launch's %zu bytes", at, shared.size() - DYNAMIC_BASE);
}
void Cta::touch(int agent, const Clock& clock, u32 at, u32 size, bool writes, const char* who) {
    for (u32 word = at / 4; word < (at + size + 3) / 4; word++) {
        Shadow& s = shadow[word];
        if (s.writer != 0xffff && s.written > clock.at[s.writer])
            FAIL("race at shared address %u: %s by %s %d after a write by %d that it does not know of", word * 4, writes ? "write" : "read", who, agent, s.writer);
        if (writes) {
            for (int i = 0; i < AGENTS; i++) if (s.read[i] > clock.at[i])
                FAIL("race at shared address %u: write by %s %d after a read by %d that it does not know of", word * 4, who, agent, i);
            s.writer = u16(agent); s.written = clock.at[agent];
            memset(s.read, 0, sizeof s.read);
        } else s.read[agent] = clock.at[agent];
    }
}
void Cta::read(Warp& w, u32 at, u32 size) {
    check(at, size);
    if (launch->options.races) touch(w.index, w.clock, at, size, false, "warp");
}
void Cta::write(Warp& w, int lane, u32 at, u32 size) {
    check(at, size);
    if (launch->options.races) touch(w.index, w.clock, at, size, true, "warp");
    writer[at / 16] = u32(w.index * 32 + lane + 1);
    written[at / 16] = launch->time++;
}
// What the asynchronous proxy reads must have been made known to it by the writer, or by the reader.
void Cta::proxy(Warp& w, u32 at, u32 size) {
    if (!launch->options.proxies) return;
    for (u32 chunk = at / 16; chunk < (at + size + 15) / 16; chunk++) if (u32 thread = writer[chunk]) {
        thread--;
        if (warps[thread / 32]->fences[thread % 32] < written[chunk] && *std::min_element(w.fences, w.fences + 32) < written[chunk])
            FAIL("shared address %u was written by warp %u with ordinary stores and is read by the tensor cores without fence.proxy.async between", chunk * 16, thread / 32);
    }
}

// A warp's knowledge is released (to barriers) and its own clock goes on.
void Warp::release() { clock.at[index]++; }

// TMA arrives.
void Cta::land(size_t index) {
    Copy copy = std::move(copies[index]);
    copies[index] = std::move(copies.back());
    copies.pop_back();
    if (copy.plain) memcpy(&shared[copy.to], copy.plain, copy.bytes);
    else {
        const TensorMap& m = copy.map;
        int box[5] = {1, 1, 1, 1, 1};
        for (int i = 0; i < m.rank; i++) box[i] = m.box[i];
        u32 at = copy.to;
        for (int e = 0; e < box[4]; e++) for (int d = 0; d < box[3]; d++) for (int c = 0; c < box[2]; c++) for (int b = 0; b < box[1]; b++) {
            int index[5] = {0, b, c, d, e};
            bool inside = true;
            const u8* from = m.base;
            for (int i = 1; i < m.rank; i++) {
                i64 place = i64(copy.coordinates[i]) + index[i];
                inside &= place >= 0 && place < m.dims[i];
                from += place * m.strides[i];
            }
            for (int x = 0; x < box[0]; x++, at += u32(m.size)) {
                i64 place = i64(copy.coordinates[0]) + x;
                u8* to = &shared[swizzled(at, m.swizzle)];
                if (inside && place >= 0 && place < m.dims[0]) memcpy(to, from + place * m.size, size_t(m.size));
                else memset(to, 0, size_t(m.size));
            }
        }
    }
    barrier(copy.barrier).transactions -= copy.bytes;
    arrive(copy.barrier, copy.clock);
    settle(copy.barrier);
}

// One cp.async instruction's copies, or arrivals, are done.
void Warp::execute_copies(size_t index) {
    if (!copies[index].arrivals.empty()) {  // everything before it comes first
        u64 number = copies[index].number;
        for (size_t i = copies.size(); i--;) if (copies[i].number < number && copies[i].arrivals.empty()) execute_copies(i);
        for (index = 0; copies[index].number != number;) index++;
    }
    AsyncCopies job = std::move(copies[index]);
    copies.erase(copies.begin() + i64(index));
    for (auto& c : job.copies) {
        memset(&cta->shared[c.to], 0, c.size);
        if (c.filled) memcpy(&cta->shared[c.to], launch->global(c.from, c.filled), c.filled);
        cta->writer[c.to / 16] = u32(this->index * 32 + c.lane + 1);
        cta->written[c.to / 16] = launch->time++;
    }
    for (auto& [lane, at] : job.arrivals) {
        cta->barrier(at).pending--;
        cta->arrive(at, clock);
        cta->settle(at);
    }
}

// ---- tensor cores

static int chunk_address(u64 descriptor, int major, int outer, int k) {
    // Of the 16 bytes with elements (outer, k..k+7), or, with `major` (MN), (outer..outer+7, k).
    u32 start = u32(descriptor & 0x3fff) << 4, lead = u32(descriptor >> 16 & 0x3fff) << 4, stride = u32(descriptor >> 32 & 0x3fff) << 4;
    int layout = int(descriptor >> 62);
    int mode = layout == 0 ? 0 : 4 - layout, width = 16 << mode;  // bytes of a row of the pattern
    u32 at;
    if (!major) {
        at = start + u32(outer / 8) * stride + u32(outer % 8 * width);
        at += mode ? u32(k) * 2 : u32(k / 8) * lead;
    } else {
        int across = width / 2;
        if (mode) at = start + u32(outer / across) * lead + u32(outer % across * 2) + u32(k % 8 * width) + u32(k / 8) * stride;
        else at = start + u32(outer / 8) * stride + u32(k % 8 * 16) + u32(k / 8) * lead;
    }
    return int(swizzled(at, mode));
}

// Operand rows x 16 as fp32 [k][row] from shared memory.
static void fetch(Warp& w, u64 descriptor, int major, int first, int rows, bool bf16, f32* out) {
    if (descriptor >> 49 & 7) FAIL("wgmma: base offset in a descriptor");
    Cta& cta = *w.cta;
    auto convert = [&](u16 h) { return bf16 ? from_bf16(h) : from_half(h); };
    auto chunk = [&](int outer, int k) {
        u32 at = u32(chunk_address(descriptor, major, outer, k));
        cta.check(at, 16);
        return reinterpret_cast<const u16*>(&cta.shared[at]);
    };
    if (!major) {
        for (int r = 0; r < rows; r++) for (int half = 0; half < 2; half++) {
            const u16* from = chunk(first + r, half * 8);
            for (int i = 0; i < 8; i++) out[(half * 8 + i) * rows + r] = convert(from[i]);
        }
    } else {
        for (int k = 0; k < 16; k++) for (int r = 0; r < rows; r += 8) {
            const u16* from = chunk(first + r, k);
            for (int i = 0; i < 8; i++) out[k * rows + r + i] = convert(from[i]);
        }
    }
}
static void note_reads(Warp& w, u64 descriptor, int major, int first, int rows, bool start = true) {
    if (!(w.launch->options.proxies && start) && !w.launch->options.races) return;
    auto one = [&](int outer, int k) {
        u32 at = u32(chunk_address(descriptor, major, outer, k));
        w.cta->check(at, 16);
        if (start) w.cta->proxy(w, at, 16);
        if (w.launch->options.races) w.cta->touch(w.index, w.clock, at, 16, false, "product of warp");
    };
    if (!major) for (int r = 0; r < rows; r++) for (int half = 0; half < 2; half++) one(first + r, half * 8);
    else for (int k = 0; k < 16; k++) for (int r = 0; r < rows; r += 8) one(first + r, k);
}

static void multiply(f32* __restrict c, const f32* __restrict a, const f32* __restrict b, int n) {
    for (int r = 0; r < 16; r++) {
        f32* __restrict to = c + r * n;
        for (int k = 0; k < 16; k++) {
            f32 x = a[k * 16 + r];
            const f32* __restrict from = b + k * n;
            for (int j = 0; j < n; j++) to[j] += x * from[j];
        }
    }
}

// The oldest product is done. Its sum reaches the registers only when it has been waited for.
void Warp::execute_product() {
    Product p = std::move(products.front());
    products.pop_front();
    const Instruction& in = *p.in;
    bool bf16 = in.b;
    int n = int(in.a);
    static thread_local f32 a[16 * 16], b[16 * 256];
    if (in.o[1].kind == Kind::vec) {
        for (int i = 0; i < 4; i++) {
            const u32* from = p.words[i];
            for (int lane = 0; lane < 32; lane++) for (int half = 0; half < 2; half++) {
                u16 h = u16(from[lane] >> (16 * half));
                int r = lane / 4 + 8 * (i % 2), k = i / 2 * 8 + lane % 4 * 2 + half;
                a[k * 16 + r] = bf16 ? from_bf16(h) : from_half(h);
            }
        }
    } else fetch(*this, p.a, int(in.c), index % 4 * 16, 16, bf16, a);
    fetch(*this, p.b, int(in.d), 0, n, bf16, b);
    if (in.n & 1) for (auto& x : a) x = -x;
    finished.push_back(p);
    if (!p.add) std::fill(p.to->c.begin(), p.to->c.end(), 0.0f);
    multiply(p.to->c.data(), a, b, n);
    p.to->pending--;
}

static Result act_product(Warp& w, const Instruction& in, u32 mask) {
    if (mask != ~0u) FAIL("wgmma by a part of a warp");
    const auto& d = in.o[0].parts;
    int n = int(in.a);
    std::shared_ptr<Accumulator> to;
    for (auto& one : w.accumulators) if (one->rows[0] == d[0].at) to = one;
    if (to) { for (size_t i = 0; i < d.size(); i++) if (to->rows[i] != d[i].at) FAIL("wgmma: accumulators of a product in flight are mixed with others"); }
    else {
        for (auto& one : w.accumulators) for (i32 at : one->rows) for (auto& x : d) if (x.at == at) FAIL("wgmma: accumulators of a product in flight are mixed with others");
        to = std::make_shared<Accumulator>();
        to->columns = n;
        to->c.resize(size_t(16 * n));
        for (size_t i = 0; i < d.size(); i++) {
            to->rows.push_back(d[i].at);
            f32* from = w.row<f32>(d[i].at);
            int r = int(i / 2 % 2 * 8), column = int(i / 4 * 8 + i % 2);
            for (int lane = 0; lane < 32; lane++) {
                to->c[size_t((r + lane / 4) * n + column + lane % 4 * 2)] = from[lane];
                from[lane] = bits<f32>(0x7fc0beefu);
            }
        }
        w.accumulators.push_back(to);
    }
    u32 add = w.pred(in.o[3]);
    if (add != 0 && add != ~0u) FAIL("wgmma: scale-d differs between lanes");
    Product p{&in, to, add != 0, 0, 0, w.product_group, {}};
    if (in.o[1].kind == Kind::vec) for (int i = 0; i < 4; i++) memcpy(p.words[i], w.row<u32>(in.o[1].parts[i]), 128);
    auto uniform = [&](const Operand& o) {
        const u64* x = w.row<u64>(o);
        for (int i = 1; i < 32; i++) if (x[i] != x[0]) FAIL("wgmma: descriptors differ between lanes");
        return x[0];
    };
    if (in.o[1].kind != Kind::vec) { p.a = uniform(in.o[1]); note_reads(w, p.a, int(in.c), w.index % 4 * 16, 16); }
    p.b = uniform(in.o[2]);
    note_reads(w, p.b, int(in.d), 0, n);
    to->pending++;
    w.products.push_back(std::move(p));
    return NEXT;
}
static Result act_product_commit(Warp& w, const Instruction&, u32) { w.product_group++; return NEXT; }
static Result act_product_wait(Warp& w, const Instruction& in, u32) {
    while (!w.products.empty() && w.products.front().group < w.product_group - in.n) w.execute_product();
    for (; !w.finished.empty() && w.finished.front().group < w.product_group - in.n; w.finished.pop_front()) {
        const Product& p = w.finished.front();
        if (p.in->o[1].kind == Kind::vec) {
            for (int i = 0; i < 4; i++) if (memcmp(p.words[i], w.row<u32>(p.in->o[1].parts[i]), 128))
                FAIL("registers of a product's A were changed before it had been waited for: %.200s", strrchr(p.in->text.c_str(), '}') - 60);
        } else note_reads(w, p.a, int(p.in->c), w.index % 4 * 16, 16, false);
        note_reads(w, p.b, int(p.in->d), 0, int(p.in->a), false);  // until now it may have read them
    }
    for (size_t j = w.accumulators.size(); j--;) {
        auto& one = *w.accumulators[j];
        if (one.pending) continue;
        // Done, but perhaps not yet waited for: only then may the program look.
        for (size_t i = 0; i < one.rows.size(); i++) {
            f32* to = w.row<f32>(one.rows[i]);
            int r = int(i / 2 % 2 * 8), column = int(i / 4 * 8 + i % 2);
            for (int lane = 0; lane < 32; lane++) to[lane] = one.c[size_t((r + lane / 4) * one.columns + column + lane % 4 * 2)];
        }
        w.accumulators.erase(w.accumulators.begin() + i64(j));
    }
    return NEXT;
}

// ---- arithmetic: every lane is computed, those of the mask are kept

template <class T> static inline void keep(T* to, const T* from, u32 mask) {
    if (mask == ~0u) memcpy(to, from, sizeof(T) * 32);
    else for (int i = 0; i < 32; i++) if (mask >> i & 1) to[i] = from[i];
}
template <class D, class A, auto F> static Result unary(Warp& w, const Instruction& in, u32 mask) {
    const A* a = w.row<A>(in.o[1]);
    D out[32];
    for (int i = 0; i < 32; i++) out[i] = F(a[i]);
    keep(w.row<D>(in.o[0].at), out, mask);
    return NEXT;
}
template <class D, class A, class B, auto F> static Result binary(Warp& w, const Instruction& in, u32 mask) {
    const A* a = w.row<A>(in.o[1]);
    const B* b = w.row<B>(in.o[2]);
    D out[32];
    for (int i = 0; i < 32; i++) out[i] = F(a[i], b[i]);
    keep(w.row<D>(in.o[0].at), out, mask);
    return NEXT;
}
template <class D, class A, class C, auto F> static Result ternary(Warp& w, const Instruction& in, u32 mask) {
    const A *a = w.row<A>(in.o[1]), *b = w.row<A>(in.o[2]);
    const C* c = w.row<C>(in.o[3]);
    D out[32];
    for (int i = 0; i < 32; i++) out[i] = F(a[i], b[i], c[i]);
    keep(w.row<D>(in.o[0].at), out, mask);
    return NEXT;
}
template <class T, auto F> static Result compare(Warp& w, const Instruction& in, u32 mask) {
    const T *a = w.row<T>(in.o[1]), *b = w.row<T>(in.o[2]);
    u32 out = 0;
    for (int i = 0; i < 32; i++) out |= u32(F(a[i], b[i])) << i;
    u32 other = ~out;
    if (in.a) {
        u32 c = w.pred(in.o[3]);
        auto join = [&](u32 x) { return in.a == 1 ? x & c : in.a == 2 ? x | c : x ^ c; };
        out = join(out); other = join(other);
    }
    w.set(in.o[0].at, mask, out);
    w.set(in.o[0].second, mask, other);
    return NEXT;
}
template <class T> static Result act_select(Warp& w, const Instruction& in, u32 mask) {
    const T *a = w.row<T>(in.o[1]), *b = w.row<T>(in.o[2]);
    u32 p = w.pred(in.o[3]);
    T out[32];
    for (int i = 0; i < 32; i++) out[i] = p >> i & 1 ? a[i] : b[i];
    keep(w.row<T>(in.o[0].at), out, mask);
    return NEXT;
}
template <auto F> static Result act_pred(Warp& w, const Instruction& in, u32 mask) {
    w.set(in.o[0].at, mask, F(w.pred(in.o[1]), in.o.size() > 2 ? w.pred(in.o[2]) : 0u));
    return NEXT;
}
static Result act_nothing(Warp&, const Instruction&, u32) { return NEXT; }
static Result act_trap(Warp&, const Instruction&, u32) { FAIL("trap"); }

template <class T> constexpr T shift_left(T x, u32 n) { return n >= sizeof(T) * 8 ? T(0) : T(std::make_unsigned_t<T>(x) << n); }
template <class T> constexpr T shift_right(T x, u32 n) { return n >= sizeof(T) * 8 ? (std::is_signed_v<T> && x < 0 ? T(-1) : T(0)) : T(x >> n); }
template <class T> constexpr T divide(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) return a / b;
    else return b == 0 ? T(-1) : b == T(-1) && std::is_signed_v<T> ? T(0 - std::make_unsigned_t<T>(a)) : T(a / b);
}
template <class T> constexpr T remainder_of(T a, T b) { return b == 0 ? a : b == T(-1) && std::is_signed_v<T> ? T(0) : T(a % b); }
template <class T> struct Wider; template <> struct Wider<i16> { using type = i32; }; template <> struct Wider<u16> { using type = u32; };
template <> struct Wider<i32> { using type = i64; }; template <> struct Wider<u32> { using type = u64; };
template <> struct Wider<i64> { using type = __int128; }; template <> struct Wider<u64> { using type = unsigned __int128; };
template <class T> constexpr T high(T a, T b) { using W = typename Wider<T>::type; return T((W(a) * W(b)) >> (sizeof(T) * 8)); }
static f32 nan_max(f32 a, f32 b) { return a != a || b != b ? bits<f32>(0x7fffffffu) : fmaxf(a, b); }
static f32 nan_min(f32 a, f32 b) { return a != a || b != b ? bits<f32>(0x7fffffffu) : fminf(a, b); }
static f32 max_of(f32 a, f32 b) { return a != a ? b : b != b ? a : a > b ? a : b; }
static f32 min_of(f32 a, f32 b) { return a != a ? b : b != b ? a : a < b ? a : b; }

// Two 16-bit numbers in a word, op 0 add 1 sub 2 mul 3 fma 4 max 5 min 6 neg 7 abs.
static Result act_halves(Warp& w, const Instruction& in, u32 mask) {
    bool bf16 = in.b;
    int width = int(in.c), count = int(in.o.size());
    for (int lane = 0; lane < 32; lane++) if (mask >> lane & 1) {
        u64 out = 0;
        for (int half = 0; half < width / 2; half++) {
            f32 x[3] = {};
            for (int i = 1; i < count; i++) { u16 h = u16(w.get(in.o[i], lane) >> (16 * half)); x[i - 1] = bf16 ? from_bf16(h) : from_half(h); }
            f64 y = 0;
            switch (in.a) {
                case 0: y = f64(x[0]) + x[1]; break; case 1: y = f64(x[0]) - x[1]; break; case 2: y = f64(x[0]) * x[1]; break;
                case 3: y = f64(x[0]) * x[1] + x[2]; break; case 4: y = max_of(x[0], x[1]); break; case 5: y = min_of(x[0], x[1]); break;
                case 6: y = -x[0]; break; default: y = fabsf(x[0]);
            }
            out |= u64(bf16 ? to_bf16(f32(y)) : to_half(f32(y))) << (16 * half);
        }
        w.put(in.o[0], lane, out);
    }
    return NEXT;
}
// cvt.rn.{bf16,f16}x2.f32 d, high, low
static Result act_pack(Warp& w, const Instruction& in, u32 mask) {
    const f32 *hi = w.row<f32>(in.o[1]), *lo = w.row<f32>(in.o[2]);
    u32 out[32];
    auto one = [&](f32 x) { if (in.a && !(x > 0) && x == x) x = 0; return u32(in.b ? to_bf16(x) : to_half(x)); };
    for (int i = 0; i < 32; i++) out[i] = one(hi[i]) << 16 | one(lo[i]);
    keep(w.row<u32>(in.o[0].at), out, mask);
    return NEXT;
}
enum { S8, S16, S32, S64, U8, U16, U32, U64, F16, BF16, F32, F64 };
static int type_of(const string& s) {
    static const std::map<string, int> types = {{"s8", S8}, {"s16", S16}, {"s32", S32}, {"s64", S64}, {"u8", U8}, {"b8", U8}, {"u16", U16}, {"b16", U16}, {"u32", U32}, {"b32", U32},
                                                {"u64", U64}, {"b64", U64}, {"f16", F16}, {"bf16", BF16}, {"f32", F32}, {"f64", F64}, {"f16x2", U32}, {"bf16x2", U32}};
    auto it = types.find(s);
    return it == types.end() ? -1 : it->second;
}
static int size_of(int type) { static const int sizes[] = {1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8}; return sizes[type]; }
static bool is_float(int type) { return type >= F16; }
static bool is_signed(int type) { return type <= S64; }
static u64 extend(u64 raw, int type) {
    switch (type) { case S8: return u64(i64(i8(raw))); case S16: return u64(i64(i16(raw))); case S32: return u64(i64(i32(raw))); case U8: return u8(raw); case U16: return u16(raw); case U32: return u32(raw); default: return raw; }
}
// a: destination type, b: source type, c: rounding (0 nearest even, 1 zero, 2 down, 3 up), d: 1 saturate, n: to an integer within floats
static Result act_convert(Warp& w, const Instruction& in, u32 mask) {
    int to = int(in.a), from = int(in.b);
    auto rounded = [&](f64 x) { return in.c == 1 ? trunc(x) : in.c == 2 ? floor(x) : in.c == 3 ? ceil(x) : nearbyint(x); };
    for (int lane = 0; lane < 32; lane++) if (mask >> lane & 1) {
        u64 raw = w.get(in.o[1], lane), out;
        if (!is_float(from) && !is_float(to)) {
            out = extend(raw, from);
            out = extend(out, to);
        } else {
            f64 x;
            if (from == F32) x = bits<f32>(u32(raw)); else if (from == F64) x = bits<f64>(raw); else if (from == F16) x = from_half(u16(raw)); else if (from == BF16) x = from_bf16(u16(raw));
            else if (is_signed(from)) x = f64(i64(extend(raw, from))); else x = f64(extend(raw, from));
            if (in.n && is_float(to)) x = rounded(x);
            if (in.d && is_float(to)) x = x > 0 ? std::min(x, 1.0) : 0.0;
            if (to == F32) { f32 y = f32(x); if (in.c == 1 && fabs(f64(y)) > fabs(x)) y = nextafterf(y, 0); out = bits<u32>(y); }
            else if (to == F64) out = bits<u64>(x);
            else if (to == F16) out = to_half(f32(x));
            else if (to == BF16) out = to_bf16(f32(x));
            else {
                x = rounded(x);
                int width = size_of(to) * 8;
                f64 low = is_signed(to) ? -ldexp(1.0, width - 1) : 0, top = ldexp(1.0, is_signed(to) ? width - 1 : width);
                if (x != x) out = 0;
                else if (x <= low) out = is_signed(to) ? u64(1) << (width - 1) : 0;
                else if (x >= top) out = is_signed(to) ? (u64(1) << (width - 1)) - 1 : width == 64 ? ~0ull : (u64(1) << width) - 1;
                else out = is_signed(to) ? u64(i64(x)) : u64(x);
                out = extend(out, to);
            }
        }
        w.put(in.o[0], lane, out);
    }
    return NEXT;
}
static Result act_join(Warp& w, const Instruction& in, u32 mask) {  // mov.b64 d, {a, b}
    for (int lane = 0; lane < 32; lane++) if (mask >> lane & 1) {
        u64 out = 0; int shift = 0;
        for (auto& part : in.o[1].parts) { u64 x = w.get(part, lane); out |= x << shift; shift += int(in.a); }
        w.put(in.o[0], lane, out);
    }
    return NEXT;
}
static Result act_part(Warp& w, const Instruction& in, u32 mask) {  // mov.b64 {a, b}, s
    for (int lane = 0; lane < 32; lane++) if (mask >> lane & 1) {
        u64 x = w.get(in.o[1], lane);
        for (auto& part : in.o[0].parts) { w.put(part, lane, x); x >>= in.a; }
    }
    return NEXT;
}
template <class F> static Result lanes(Warp& w, const Instruction& in, u32 mask, F f) {
    u64 out[32] = {};
    for (int lane = 0; lane < 32; lane++) if (mask >> lane & 1) out[lane] = f(lane);
    for (int lane = 0; lane < 32; lane++) if (mask >> lane & 1) w.put(in.o[0], lane, out[lane]);
    return NEXT;
}
static Result act_prmt(Warp& w, const Instruction& in, u32 mask) {
    return lanes(w, in, mask, [&](int l) {
        u64 both = w.row<u32>(in.o[1])[l] | u64(w.row<u32>(in.o[2])[l]) << 32; u32 how = w.row<u32>(in.o[3])[l], out = 0;
        for (int i = 0; i < 4; i++) { u32 s = how >> (4 * i) & 15; u32 byte = u32(both >> (8 * (s & 7))) & 255; if (s & 8) byte = byte & 128 ? 255 : 0; out |= byte << (8 * i); }
        return u64(out);
    });
}
static Result act_lop3(Warp& w, const Instruction& in, u32 mask) {
    return lanes(w, in, mask, [&](int l) {
        u32 a = w.row<u32>(in.o[1])[l], b = w.row<u32>(in.o[2])[l], c = w.row<u32>(in.o[3])[l], out = 0;
        for (int i = 0; i < 8; i++) if (in.n >> i & 1) out |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
        return u64(out);
    });
}
static Result act_shf(Warp& w, const Instruction& in, u32 mask) {
    return lanes(w, in, mask, [&](int l) {
        u64 both = w.row<u32>(in.o[1])[l] | u64(w.row<u32>(in.o[2])[l]) << 32; u32 n = w.row<u32>(in.o[3])[l];
        n = in.b ? n & 31 : std::min(n, 32u);
        return in.a ? u64(u32((both << n) >> 32)) : u64(u32(both >> n));
    });
}
static Result act_bfe(Warp& w, const Instruction& in, u32 mask) {
    return lanes(w, in, mask, [&](int l) {
        u64 x = w.get(in.o[1], l); u32 at = w.row<u32>(in.o[2])[l] & 255, n = w.row<u32>(in.o[3])[l] & 255; int width = size_of(int(in.a)) * 8;
        if (n == 0) return u64(0);
        i64 value = is_signed(int(in.a)) ? i64(extend(x, int(in.a))) : i64(x);
        u64 shifted = at >= u32(width) ? u64(value < 0 ? -1 : 0) : is_signed(int(in.a)) ? u64(value >> at) : u64(value) >> at;
        if (n >= 64) return shifted;
        u64 part = shifted & ((1ull << n) - 1);
        if (is_signed(int(in.a)) && part >> (n - 1) & 1) part |= ~0ull << n;
        return part;
    });
}
static Result act_bfi(Warp& w, const Instruction& in, u32 mask) {
    return lanes(w, in, mask, [&](int l) {
        u64 a = w.get(in.o[1], l), b = w.get(in.o[2], l); u32 at = w.row<u32>(in.o[3])[l] & 255, n = w.row<u32>(in.o[4])[l] & 255;
        if (at >= 64) return b;
        u64 m = (n >= 64 ? ~0ull : (1ull << n) - 1) << at;
        return (b & ~m) | (a << at & m);
    });
}

// ---- between lanes

// Whether the named lanes are all here; otherwise the warp waits for those that are behind.
static bool together(Warp& w, u32 members) { return (members & w.live & ~w.active) == 0; }

static Result act_shuffle(Warp& w, const Instruction& in, u32 mask) {
    const u32 *a = w.row<u32>(in.o[1]), *b = w.row<u32>(in.o[2]), *c = w.row<u32>(in.o[3]), *m = w.row<u32>(in.o[4]);
    int any = __builtin_ctz(mask);
    if (!together(w, m[any])) return BLOCKED;
    u32 out[32], found = 0;
    for (int lane = 0; lane < 32; lane++) {
        u32 segment = c[lane] >> 8 & 31, clamp = c[lane] & 31;
        int top = int((u32(lane) & segment) | (clamp & ~segment)), low = int(u32(lane) & segment), j = 0;
        bool inside = true;
        switch (in.a) {
            case 0: j = int(u32(low) | (b[lane] & 31 & ~segment)); inside = j <= top; break;
            case 1: j = int(u32(lane) ^ (b[lane] & 31)); inside = j <= top; break;
            case 2: j = lane - int(b[lane] & 31); inside = j >= top; break;
            default: j = lane + int(b[lane] & 31); inside = j <= top;
        }
        if (!inside) j = lane;
        out[lane] = mask >> j & 1 ? a[j] : 0x7fc0dead;
        found |= u32(inside) << lane;
    }
    if (in.o[0].at >= 0) keep(w.row<u32>(in.o[0].at), out, mask);
    w.set(in.o[0].second, mask, found);
    return NEXT;
}
static Result act_vote(Warp& w, const Instruction& in, u32 mask) {
    const u32* m = w.row<u32>(in.o[2]);
    if (!together(w, m[__builtin_ctz(mask)])) return BLOCKED;
    u32 p = w.pred(in.o[1]) & mask;
    switch (in.a) {
        case 0: for (int i = 0; i < 32; i++) if (mask >> i & 1) w.put(in.o[0], i, p); break;
        case 1: w.set(in.o[0].at, mask, p ? ~0u : 0); break;
        case 2: w.set(in.o[0].at, mask, p == mask ? ~0u : 0); break;
        default: w.set(in.o[0].at, mask, p == mask || !p ? ~0u : 0);
    }
    return NEXT;
}
static Result act_elect(Warp& w, const Instruction& in, u32 mask) {
    const u32* m = w.row<u32>(in.o[1]);
    if (!together(w, m[__builtin_ctz(mask)])) return BLOCKED;
    u32 leader = u32(__builtin_ctz(mask));
    if (in.o[0].at >= 0) for (int i = 0; i < 32; i++) if (mask >> i & 1) w.put(in.o[0], i, leader);
    w.set(in.o[0].second, mask, 1u << leader);
    return NEXT;
}
static Result act_redux(Warp& w, const Instruction& in, u32 mask) {
    if (!together(w, w.row<u32>(in.o[2])[__builtin_ctz(mask)])) return BLOCKED;
    i64 out = 0; bool first = true;
    for (int l = 0; l < 32; l++) if (mask >> l & 1) {
        i64 x = in.b ? i64(w.row<i32>(in.o[1])[l]) : i64(w.row<u32>(in.o[1])[l]);
        if (first) out = x;
        else switch (in.a) { case 0: out += x; break; case 1: out = std::min(out, x); break; case 2: out = std::max(out, x); break; case 3: out &= x; break; case 4: out |= x; break; default: out ^= x; }
        first = false;
    }
    for (int l = 0; l < 32; l++) if (mask >> l & 1) w.put(in.o[0], l, u64(out));
    return NEXT;
}
static Result act_match(Warp& w, const Instruction& in, u32 mask) {
    if (!together(w, w.row<u32>(in.o[2])[__builtin_ctz(mask)])) return BLOCKED;
    return lanes(w, in, mask, [&](int l) { u32 out = 0; for (int i = 0; i < 32; i++) if (mask >> i & 1 && w.get(in.o[1], i) == w.get(in.o[1], l)) out |= 1u << i; return u64(out); });
}
static Result act_activemask(Warp& w, const Instruction& in, u32 mask) { return lanes(w, in, mask, [&](int) { return u64(mask); }); }
static Result act_warp_sync(Warp& w, const Instruction& in, u32 mask) { return together(w, w.row<u32>(in.o[0])[__builtin_ctz(mask)]) ? NEXT : BLOCKED; }

// ---- memory

enum { GENERIC, GLOBAL, SHARED, LOCAL, PARAM };
static u8* place(Warp& w, int space, u64 address, u32 size, int lane, bool writes) {
    if (space == GENERIC) {
        if (address & SHARED_WINDOW) { space = SHARED; address &= ~SHARED_WINDOW; }
        else if (address & LOCAL_WINDOW) { space = LOCAL; address &= ~LOCAL_WINDOW; }
        else space = GLOBAL;
    }
    switch (space) {
        case SHARED:
            if (writes) w.cta->write(w, lane, u32(address), size); else w.cta->read(w, u32(address), size);
            return &w.cta->shared[u32(address)];
        case LOCAL: {
            u64 at = address & ~LOCAL_WINDOW;
            if (at + size > w.program->local_bytes) FAIL("local address %ld", long(at));
            return &w.local[u64(lane) * w.program->local_bytes + at];
        }
        case PARAM: {
            u64 begin = u64(w.launch->parameters);
            if (address < begin || address + size > begin + w.program->parameter_bytes) FAIL("parameter address");
            return reinterpret_cast<u8*>(address);
        }
        default: return w.launch->global(address, size);
    }
}
// a: space, b: type, c: numbers in a row
static Result act_load(Warp& w, const Instruction& in, u32 mask) {
    int type = int(in.b), size = size_of(type), count = int(in.c);
    const Operand* d = in.o[0].kind == Kind::vec ? in.o[0].parts.data() : &in.o[0];
    u8* from[32];
    for (int lane = 0; lane < 32; lane++) if (mask >> lane & 1) from[lane] = place(w, int(in.a), w.address(in.o[1], lane), u32(size * count), lane, false);
    for (int i = 0; i < count; i++) {
        if (size == 4 && d[i].width == 4 && d[i].at >= 0) {
            u32* to = w.row<u32>(d[i].at);
            for (int lane = 0; lane < 32; lane++) if (mask >> lane & 1) memcpy(&to[lane], from[lane] + 4 * i, 4);
        } else for (int lane = 0; lane < 32; lane++) if (mask >> lane & 1) {
            u64 raw = 0;
            memcpy(&raw, from[lane] + size * i, size_t(size));
            w.put(d[i], lane, is_float(type) ? raw : extend(raw, type));
        }
    }
    return NEXT;
}
static Result act_store(Warp& w, const Instruction& in, u32 mask) {
    int size = size_of(int(in.b)), count = int(in.c);
    const Operand* s = in.o[1].kind == Kind::vec ? in.o[1].parts.data() : &in.o[1];
    for (int lane = 0; lane < 32; lane++) if (mask >> lane & 1) {
        u8* to = place(w, int(in.a), w.address(in.o[0], lane), u32(size * count), lane, true);
        for (int i = 0; i < count; i++) { u64 raw = w.get(s[i], lane); memcpy(to + size * i, &raw, size_t(size)); }
    }
    return NEXT;
}
// a: space, b: type, c: operation, d: 1 without a result
static Result act_atomic(Warp& w, const Instruction& in, u32 mask) {
    int type = int(in.b), size = size_of(type), base = in.d ? 0 : 1;
    for (int lane = 0; lane < 32; lane++) if (mask >> lane & 1) {
        u64 address = w.address(in.o[base], lane);
        bool shared = in.a == SHARED || (in.a == GENERIC && address & SHARED_WINDOW);
        u8* at;
        if (shared) { u32 offset = u32(address & ~SHARED_WINDOW); w.cta->check(offset, u32(size)); at = &w.cta->shared[offset]; }
        else at = w.launch->global(address, u32(size));
        u64 old = 0, x = w.get(in.o[base + 1], lane), out = 0;
        memcpy(&old, at, size_t(size));
        i64 a = i64(extend(old, type)), b = i64(extend(x, type));
        if (type == F32) {
            if (in.c == 0) out = bits<u32>(bits<f32>(u32(old)) + bits<f32>(u32(x)));
            else if (in.c == 3) out = x; else FAIL("atomic on f32");
        } else switch (in.c) {
            case 0: out = u64(a + b); break;
            case 1: out = is_signed(type) ? u64(std::min(a, b)) : std::min(u64(a), u64(b)); break;
            case 2: out = is_signed(type) ? u64(std::max(a, b)) : std::max(u64(a), u64(b)); break;
            case 3: out = x; break;
            case 4: out = old == extend(x, type) ? w.get(in.o[base + 2], lane) : old; break;
            case 5: out = old & x; break; case 6: out = old | x; break; case 7: out = old ^ x; break;
            case 8: out = u64(a) >= u64(b) ? 0 : u64(a) + 1; break;
            default: FAIL("atomic operation");
        }
        memcpy(at, &out, size_t(size));
        if (!in.d) w.put(in.o[0], lane, type == F32 ? old : extend(old, type));
    }
    return YIELD;
}
// a: matrices, b: transposed
static Result act_matrices(Warp& w, const Instruction& in, u32 mask) {
    if (mask != ~0u) FAIL("matrices by a part of a warp");
    bool loads = in.c;
    const Operand &memory = in.o[loads ? 1 : 0], &values = in.o[loads ? 0 : 1];
    const Operand* v = values.kind == Kind::vec ? values.parts.data() : &values;
    for (u32 m = 0; m < in.a; m++) {
        u32 at[8];
        for (int r = 0; r < 8; r++) {
            at[r] = u32(w.address(memory, int(m) * 8 + r));
            if (loads) w.cta->read(w, at[r], 16); else w.cta->write(w, int(m) * 8 + r, at[r], 16);
        }
        u32* x = w.row<u32>(v[m].at);
        for (int lane = 0; lane < 32; lane++) {
            u16 h[2] = {u16(x[lane]), u16(x[lane] >> 16)};
            for (int i = 0; i < 2; i++) {
                int r = in.b ? lane % 4 * 2 + i : lane / 4, c = in.b ? lane / 4 : lane % 4 * 2 + i;
                u8* p = &w.cta->shared[at[r] + u32(c) * 2];
                if (loads) memcpy(&h[i], p, 2); else memcpy(p, &h[i], 2);
            }
            if (loads) x[lane] = h[0] | u32(h[1]) << 16;
        }
    }
    return NEXT;
}

// ---- barriers and copies

static Result act_barrier_init(Warp& w, const Instruction& in, u32 mask) {
    for (int l = 0; l < 32; l++) if (mask >> l & 1) {
        u32 at = u32(w.address(in.o[0], l));
        w.cta->check(at, 8);
        i64 count = w.row<u32>(in.o[1])[l];
        w.cta->barriers[at / 8] = {count, count, 0, 0, true, WARPS + w.cta->agents++ % (AGENTS - WARPS)};
    }
    return NEXT;
}
static Result act_barrier_inval(Warp& w, const Instruction& in, u32 mask) {
    for (int l = 0; l < 32; l++) if (mask >> l & 1) w.cta->barrier(u32(w.address(in.o[0], l))).valid = false;
    return NEXT;
}
// a: arrives, b: expects, o: state, address, number
static Result act_arrive(Warp& w, const Instruction& in, u32 mask) {
    for (int l = 0; l < 32; l++) if (mask >> l & 1) {
        u32 at = u32(w.address(in.o[1], l));
        Barrier& b = w.cta->barrier(at);
        u32 number = in.o.size() > 2 ? w.row<u32>(in.o[2])[l] : 1;
        if (in.b) b.transactions += number;
        w.put(in.o[0], l, b.phase);
        if (in.a) b.pending -= in.b ? 1 : number;
        w.cta->arrive(at, w.clock);
        w.cta->settle(at);
    }
    w.release();
    return NEXT;
}
static Result act_complete(Warp& w, const Instruction& in, u32 mask) {
    for (int l = 0; l < 32; l++) if (mask >> l & 1) { u32 at = u32(w.address(in.o[0], l)); w.cta->barrier(at).transactions -= w.row<u32>(in.o[1])[l]; w.cta->settle(at); }
    return NEXT;
}
// a: by parity
static Result act_wait(Warp& w, const Instruction& in, u32 mask) {
    u32 done = 0;
    for (int l = 0; l < 32; l++) if (mask >> l & 1) {
        u32 at = u32(w.address(in.o[1], l));
        Barrier& b = w.cta->barrier(at);
        bool over = in.a ? (b.phase & 1) != (w.row<u32>(in.o[2])[l] & 1) : b.phase != w.row<u64>(in.o[2])[l];
        done |= u32(over) << l;
        if (over && w.launch->options.races) w.clock.join(w.cta->clocks[at].second);
    }
    w.set(in.o[0].at, mask, done);
    return done == mask ? NEXT : YIELD;
}
// a: 0 sync, 1 arrive
static Result act_bar(Warp& w, const Instruction& in, u32 mask) {
    if (mask != w.live) return BLOCKED;
    int lane = __builtin_ctz(mask);
    u32 id = w.row<u32>(in.o[0])[lane];
    if (id >= 16) FAIL("barrier %u", id);
    i64 count = in.o.size() > 1 ? i64(w.row<u32>(in.o[1])[lane]) : i64(w.cta->warps.size() * 32);
    NamedBarrier& b = w.cta->named[id];
    if (w.barrier_id < 0) {
        b.arrived += 32;
        b.gathering.join(w.clock);
        w.release();
        w.barrier_id = int(id);
        w.barrier_generation = b.generation;
        if (b.arrived > count) FAIL("barrier %u: more threads than its %ld", id, long(count));
        if (b.arrived == count) { b.arrived = 0; b.generation++; b.ready = b.gathering; b.gathering = Clock(); }
        if (in.a) { w.barrier_id = -1; return NEXT; }
    }
    if (b.generation == w.barrier_generation) return BLOCKED;
    w.barrier_id = -1;
    w.clock.join(b.ready);
    return NEXT;
}
static Result act_proxy_fence(Warp& w, const Instruction&, u32 mask) {
    for (int l = 0; l < 32; l++) if (mask >> l & 1) w.fences[l] = w.launch->time;
    w.launch->time++;
    return NEXT;
}
static void poison(Warp& w, u32 to, u32 bytes, const Clock& clock, int agent) {
    Cta& c = *w.cta;
    if (to < DYNAMIC_BASE || u64(to) + bytes > c.shared.size()) FAIL("a copy's target %u is outside of shared memory", to);
    if (w.launch->options.races) c.touch(agent, clock, to, bytes, true, agent < WARPS ? "cp.async of warp" : "copy");
    memset(&c.shared[to], 0xff, bytes);
    for (u32 chunk = to / 16; chunk < (to + bytes + 15) / 16; chunk++) c.writer[chunk] = 0;
}
// cp.async.bulk[.tensor]: a: dimensions, 0 for plain memory
static Result act_bulk(Warp& w, const Instruction& in, u32 mask) {
    for (int l = 0; l < 32; l++) if (mask >> l & 1) {
        Copy copy{};
        copy.cta = w.cta; copy.warp = w.index; copy.lane = l;
        copy.to = u32(w.address(in.o[0], l));
        if (in.a) {
            copy.barrier = u32(w.address(in.o[2], l));
            copy.map = read_map(place(w, PARAM, w.address(in.o[1], l), 64, l, false));
            if (copy.map.rank != int(in.a)) FAIL("a tensor map of %d dimensions is used with %u", copy.map.rank, in.a);
            const auto& coordinates = in.o[1].parts[0].parts;
            copy.bytes = u32(copy.map.size);
            for (u32 i = 0; i < in.a; i++) { copy.coordinates[i] = w.row<i32>(coordinates[i])[l]; copy.bytes *= u32(copy.map.box[i]); }
            if (copy.to % 128) FAIL("a copy's target %u is not aligned to 128 bytes", copy.to);
            if (copy.map.swizzle && copy.map.box[0] * copy.map.size != 16 << copy.map.swizzle) FAIL("tensor map: a box of %d bytes in swizzle %d", copy.map.box[0] * copy.map.size, copy.map.swizzle);
            if (u64(copy.map.base) % 16) FAIL("tensor map: base is not aligned");
            // The whole tensor must belong to the arguments.
            i64 last = copy.map.size;
            for (int i = 0; i < copy.map.rank; i++) last += (copy.map.dims[i] - 1) * copy.map.strides[i];
            w.launch->global(u64(copy.map.base), 1);
            w.launch->global(u64(copy.map.base) + u64(last) - 1, 1);
        } else {
            copy.bytes = w.row<u32>(in.o[2])[l];
            copy.barrier = u32(w.address(in.o[3], l));
            if (copy.bytes % 16 || copy.to % 16) FAIL("bulk copy: alignment");
            u64 from = w.address(in.o[1], l);
            copy.plain = w.launch->global(from, 16);
            w.launch->global(from + copy.bytes - 16, 16);
        }
        int agent = w.cta->barrier(copy.barrier).agent;
        copy.clock = w.clock;
        copy.clock.at[agent] = ++w.cta->copy_clock;
        poison(w, copy.to, copy.bytes, copy.clock, agent);
        w.cta->copies.push_back(std::move(copy));
    }
    w.release();
    return YIELD;
}
static Result act_copy(Warp& w, const Instruction& in, u32 mask) {  // cp.async: to, from, size [, filled]
    AsyncCopies job{w.launch->time++, w.copy_group, {}, {}};
    for (int l = 0; l < 32; l++) if (mask >> l & 1) {
        u32 size = w.row<u32>(in.o[2])[l], filled = in.o.size() > 3 ? w.row<u32>(in.o[3])[l] : size;
        u32 to = u32(w.address(in.o[0], l));
        u64 from = w.address(in.o[1], l);
        w.cta->check(to, size);
        if (filled) w.launch->global(from, size);
        poison(w, to, size, w.clock, w.index);
        job.copies.push_back({to, from, size, filled, l});
    }
    w.copies.push_back(std::move(job));
    return NEXT;
}
static Result act_copy_arrive(Warp& w, const Instruction& in, u32 mask) {
    AsyncCopies job{w.launch->time++, w.copy_group, {}, {}};
    for (int l = 0; l < 32; l++) if (mask >> l & 1) {
        u32 at = u32(w.address(in.o[0], l));
        if (!in.a) w.cta->barrier(at).pending++;  // without .noinc the count grows first
        job.arrivals.push_back({l, at});
    }
    w.copies.push_back(std::move(job));
    w.release();
    return NEXT;
}
static Result act_copy_commit(Warp& w, const Instruction&, u32) { w.copy_group++; return NEXT; }
static Result act_copy_wait(Warp& w, const Instruction& in, u32) {
    i64 pending = in.a ? -1 : in.n;
    for (bool found = true; found;) {
        found = false;
        for (size_t i = 0; i < w.copies.size(); i++)
            if (w.copies[i].arrivals.empty() && (pending < 0 || w.copies[i].group < w.copy_group - pending)) { w.execute_copies(i); found = true; break; }
    }
    return NEXT;
}

// ---------------------------------------------------------------------------------------------------- decoding

#define ON(T, KIND, ...) case T: in.act = KIND<__VA_ARGS__>; return true;

static bool arithmetic(Instruction& in, const string& op, const vector<string>& parts, int type) {
    const string& name = parts[0];
    auto has = [&](const char* s) { return std::find(parts.begin(), parts.end(), s) != parts.end(); };
#define INTEGER2(EXPRESSION) switch (type) { \
    case S16: in.act = binary<i16, i16, i16, [](i16 a, i16 b) -> i16 { return i16(EXPRESSION); }>; return true; \
    case U16: in.act = binary<u16, u16, u16, [](u16 a, u16 b) -> u16 { return u16(EXPRESSION); }>; return true; \
    case S32: in.act = binary<i32, i32, i32, [](i32 a, i32 b) -> i32 { return i32(EXPRESSION); }>; return true; \
    case U32: in.act = binary<u32, u32, u32, [](u32 a, u32 b) -> u32 { return u32(EXPRESSION); }>; return true; \
    case S64: in.act = binary<i64, i64, i64, [](i64 a, i64 b) -> i64 { return i64(EXPRESSION); }>; return true; \
    case U64: in.act = binary<u64, u64, u64, [](u64 a, u64 b) -> u64 { return u64(EXPRESSION); }>; return true; default: break; }
#define FLOAT2(EXPRESSION) switch (type) { \
    case F32: in.act = binary<f32, f32, f32, [](f32 a, f32 b) -> f32 { return EXPRESSION; }>; return true; \
    case F64: in.act = binary<f64, f64, f64, [](f64 a, f64 b) -> f64 { return EXPRESSION; }>; return true; default: break; }
#define INTEGER1(EXPRESSION) switch (type) { \
    case S16: case U16: in.act = unary<i16, i16, [](i16 a) -> i16 { return i16(EXPRESSION); }>; return true; \
    case S32: case U32: in.act = unary<i32, i32, [](i32 a) -> i32 { return i32(EXPRESSION); }>; return true; \
    case S64: case U64: in.act = unary<i64, i64, [](i64 a) -> i64 { return i64(EXPRESSION); }>; return true; default: break; }
    if (name == "add") { INTEGER2(u64(a) + u64(b)) FLOAT2(a + b) }
    if (name == "sub") { INTEGER2(u64(a) - u64(b)) FLOAT2(a - b) }
    if (name == "mul" && has("wide")) {
        switch (type) {
            case S16: in.act = binary<i32, i16, i16, [](i16 a, i16 b) { return i32(a) * i32(b); }>; return true;
            case U16: in.act = binary<u32, u16, u16, [](u16 a, u16 b) { return u32(a) * u32(b); }>; return true;
            case S32: in.act = binary<i64, i32, i32, [](i32 a, i32 b) { return i64(a) * i64(b); }>; return true;
            case U32: in.act = binary<u64, u32, u32, [](u32 a, u32 b) { return u64(a) * u64(b); }>; return true;
            default: return false;
        }
    }
    if (name == "mul" && has("hi")) { INTEGER2(high(a, b)) }
    if (name == "mul") { INTEGER2(u64(a) * u64(b)) FLOAT2(a * b) }
    if (name == "mad" && has("wide")) {
        switch (type) {
            case S16: in.act = ternary<i32, i16, i32, [](i16 a, i16 b, i32 c) { return i32(u32(i32(a) * i32(b)) + u32(c)); }>; return true;
            case S32: in.act = ternary<i64, i32, i64, [](i32 a, i32 b, i64 c) { return i64(u64(i64(a) * i64(b)) + u64(c)); }>; return true;
            case U32: in.act = ternary<u64, u32, u64, [](u32 a, u32 b, u64 c) { return u64(a) * u64(b) + c; }>; return true;
            default: return false;
        }
    }
    if (name == "mad" || name == "fma") {
        switch (type) {
            ON(S32, ternary, i32, i32, i32, [](i32 a, i32 b, i32 c) { return i32(u32(a) * u32(b) + u32(c)); })
            ON(U32, ternary, u32, u32, u32, [](u32 a, u32 b, u32 c) { return a * b + c; })
            ON(S64, ternary, i64, i64, i64, [](i64 a, i64 b, i64 c) { return i64(u64(a) * u64(b) + u64(c)); })
            ON(U64, ternary, u64, u64, u64, [](u64 a, u64 b, u64 c) { return a * b + c; })
            ON(F32, ternary, f32, f32, f32, [](f32 a, f32 b, f32 c) { return __builtin_fmaf(a, b, c); })
            ON(F64, ternary, f64, f64, f64, [](f64 a, f64 b, f64 c) { return __builtin_fma(a, b, c); })
            default: return false;
        }
    }
    if (name == "div") { INTEGER2(divide(a, b)) FLOAT2(a / b) }
    if (name == "rem") { INTEGER2(remainder_of(a, b)) }
    if (name == "min" && has("relu")) { INTEGER2(std::max<i64>(0, i64(a < b ? a : b))) }
    if (name == "max" && has("relu")) { INTEGER2(std::max<i64>(0, i64(a > b ? a : b))) }
    if (name == "min" && has("NaN") && type == F32) { in.act = binary<f32, f32, f32, nan_min>; return true; }
    if (name == "max" && has("NaN") && type == F32) { in.act = binary<f32, f32, f32, nan_max>; return true; }
    if (name == "min" && type == F32) { in.act = binary<f32, f32, f32, min_of>; return true; }
    if (name == "max" && type == F32) { in.act = binary<f32, f32, f32, max_of>; return true; }
    if (name == "min") { INTEGER2(a < b ? a : b) }
    if (name == "max") { INTEGER2(a > b ? a : b) }
    if (name == "and") { INTEGER2(a & b) }
    if (name == "or") { INTEGER2(a | b) }
    if (name == "xor") { INTEGER2(a ^ b) }
    if (name == "not") { INTEGER1(~a) }
    if (name == "neg" && type == F32) { in.act = unary<f32, f32, [](f32 a) { return -a; }>; return true; }
    if (name == "neg") { INTEGER1(0 - u64(a)) }
    if (name == "abs" && type == F32) { in.act = unary<f32, f32, [](f32 a) { return fabsf(a); }>; return true; }
    if (name == "abs") { INTEGER1(a < 0 ? 0 - u64(a) : u64(a)) }
    if (name == "shl") switch (type) {
        case U16: case S16: in.act = binary<u16, u16, u32, [](u16 a, u32 n) { return shift_left(a, n); }>; return true;
        case U32: case S32: in.act = binary<u32, u32, u32, [](u32 a, u32 n) { return shift_left(a, n); }>; return true;
        case U64: case S64: in.act = binary<u64, u64, u32, [](u64 a, u32 n) { return shift_left(a, n); }>; return true;
    }
    if (name == "shr") switch (type) {
        ON(U16, binary, u16, u16, u32, [](u16 a, u32 n) { return shift_right(a, n); })
        ON(S16, binary, i16, i16, u32, [](i16 a, u32 n) { return shift_right(a, n); })
        ON(U32, binary, u32, u32, u32, [](u32 a, u32 n) { return shift_right(a, n); })
        ON(S32, binary, i32, i32, u32, [](i32 a, u32 n) { return shift_right(a, n); })
        ON(U64, binary, u64, u64, u32, [](u64 a, u32 n) { return shift_right(a, n); })
        ON(S64, binary, i64, i64, u32, [](i64 a, u32 n) { return shift_right(a, n); })
    }
    if (type == F32) {
        // Fast exponentials and logarithms flush numbers below 2^-126.
        if (name == "ex2") { in.act = unary<f32, f32, [](f32 a) -> f32 { f32 y = exp2f(a); return y < 1.17549435e-38f ? 0.0f : y; }>; return true; }
        if (name == "lg2") { in.act = unary<f32, f32, [](f32 a) -> f32 { return fabsf(a) < 1.17549435e-38f ? -INFINITY : log2f(a); }>; return true; }
        if (name == "rcp") { in.act = unary<f32, f32, [](f32 a) { return 1.0f / a; }>; return true; }
        if (name == "sqrt") { in.act = unary<f32, f32, [](f32 a) { return sqrtf(a); }>; return true; }
        if (name == "rsqrt") { in.act = unary<f32, f32, [](f32 a) { return 1.0f / sqrtf(a); }>; return true; }
        if (name == "tanh") { in.act = unary<f32, f32, [](f32 a) { return tanhf(a); }>; return true; }
    }
    if (name == "popc") switch (type) {
        ON(U32, unary, u32, u32, [](u32 a) { return u32(__builtin_popcount(a)); })
        ON(U64, unary, u32, u64, [](u64 a) { return u32(__builtin_popcountll(a)); })
    }
    if (name == "clz") switch (type) {
        ON(U32, unary, u32, u32, [](u32 a) { return a ? u32(__builtin_clz(a)) : 32u; })
        ON(U64, unary, u32, u64, [](u64 a) { return a ? u32(__builtin_clzll(a)) : 64u; })
    }
    if (name == "bfind" && !has("shiftamt") && type == U32) { in.act = unary<u32, u32, [](u32 a) { return a ? u32(31 - __builtin_clz(a)) : ~0u; }>; return true; }
    if (name == "brev" && type == U32) { in.act = unary<u32, u32, [](u32 a) { u32 y = 0; for (int i = 0; i < 32; i++) y |= (a >> i & 1) << (31 - i); return y; }>; return true; }
    (void)op;
    return false;
}

// Comparisons of floats: those that end in u are true for NaNs.
template <class T> static bool equal(T a, T b) { return a == b; }
template <class T> static bool differ(T a, T b) { return a < b || b < a; }
template <class T> static bool less(T a, T b) { return a < b; }
template <class T> static bool less_equal(T a, T b) { return a <= b; }
template <class T> static bool greater(T a, T b) { return b < a; }
template <class T> static bool greater_equal(T a, T b) { return b <= a; }
template <class T, bool (*F)(T, T)> static bool negation(T a, T b) { return !F(a, b); }
template <class T> static bool numbers(T a, T b) { return a == a && b == b; }
template <class T> static Action comparison(const string& how) {
    static const std::map<string, Action> table = {
        {"eq", compare<T, equal<T>>}, {"ne", compare<T, differ<T>>}, {"lt", compare<T, less<T>>}, {"le", compare<T, less_equal<T>>},
        {"gt", compare<T, greater<T>>}, {"ge", compare<T, greater_equal<T>>}, {"lo", compare<T, less<T>>}, {"ls", compare<T, less_equal<T>>},
        {"hi", compare<T, greater<T>>}, {"hs", compare<T, greater_equal<T>>},
        {"equ", compare<T, negation<T, differ<T>>>}, {"neu", compare<T, negation<T, equal<T>>>}, {"ltu", compare<T, negation<T, greater_equal<T>>>},
        {"leu", compare<T, negation<T, greater<T>>>}, {"gtu", compare<T, negation<T, less_equal<T>>>}, {"geu", compare<T, negation<T, less<T>>>},
        {"num", compare<T, numbers<T>>}, {"nan", compare<T, negation<T, numbers<T>>>},
    };
    auto it = table.find(how);
    return it == table.end() ? nullptr : it->second;
}

static bool decode(Decoder& d, Instruction& in, const string& op, const vector<string>& args) {
    vector<string> parts;
    for (size_t at = 0; at <= op.size();) {
        size_t end = op.find('.', at);
        if (end == string::npos) end = op.size();
        parts.push_back(op.substr(at, end - at));
        at = end + 1;
    }
    const string& name = parts[0];
    auto has = [&](const char* s) { return std::find(parts.begin(), parts.end(), s) != parts.end(); };
    auto starts = [&](const char* s) { return op.rfind(s, 0) == 0; };
    auto take = [&](int width, size_t from = 0, size_t to = 99) { for (size_t i = from; i < std::min(to, args.size()); i++) in.o.push_back(d.operand(args[i], width)); };
    string last = parts.back();
    int type = type_of(last), width = type < 0 ? 4 : std::max(size_of(type), 2);

    if (name == "mov") {
        if (last == "pred") { in.o = {d.pred(args[0]), d.pred(args[1])}; in.act = act_pred<[](u32 a, u32) { return a; }>; return true; }
        take(width);
        if (in.o[1].kind == Kind::vec) { in.a = u32(width * 8 / int(in.o[1].parts.size())); in.act = act_join; return true; }
        if (in.o[0].kind == Kind::vec) { in.a = u32(width * 8 / int(in.o[0].parts.size())); in.act = act_part; return true; }
        switch (width) {
            ON(2, unary, u16, u16, [](u16 a) { return a; })
            ON(4, unary, u32, u32, [](u32 a) { return a; })
            ON(8, unary, u64, u64, [](u64 a) { return a; })
        }
        return false;
    }
    if (name == "cvta") {
        take(8);
        if (has("shared")) in.act = has("to") ? unary<u64, u64, [](u64 a) { return a & ~SHARED_WINDOW; }> : unary<u64, u64, [](u64 a) { return a | SHARED_WINDOW; }>;
        else if (has("local")) in.act = has("to") ? unary<u64, u64, [](u64 a) { return a & ~LOCAL_WINDOW; }> : unary<u64, u64, [](u64 a) { return a | LOCAL_WINDOW; }>;
        else in.act = unary<u64, u64, [](u64 a) { return a; }>;
        return true;
    }
    if (name == "cvt") {
        if (last == "f32" && (has("bf16x2") || has("f16x2"))) { take(4); in.b = has("bf16x2"); in.a = has("relu"); in.act = act_pack; return true; }
        int to = type_of(parts[parts.size() - 2]);
        if (to < 0 || type < 0) return false;
        in.o = {d.operand(args[0], std::max(2, size_of(to))), d.operand(args[1], width)};
        in.a = u32(to); in.b = u32(type); in.d = has("sat");
        in.c = has("rz") || has("rzi") ? 1 : has("rm") || has("rmi") ? 2 : has("rp") || has("rpi") ? 3 : 0;
        in.n = has("rzi") || has("rni") || has("rmi") || has("rpi");
        // A 32-bit value may stand in a register of 64.
        const bool usual = in.o[0].width == 8 && in.o[1].width == 4;
        if (to == S64 && type == S32 && usual) in.act = unary<i64, i32, [](i32 a) { return i64(a); }>;
        else if (to == U64 && type == U32 && usual) in.act = unary<u64, u32, [](u32 a) { return u64(a); }>;
        else in.act = act_convert;
        return true;
    }
    if (last == "pred") {
        for (auto& a : args) in.o.push_back(d.pred(a));
        if (name == "and") in.act = act_pred<[](u32 a, u32 b) { return a & b; }>;
        else if (name == "or") in.act = act_pred<[](u32 a, u32 b) { return a | b; }>;
        else if (name == "xor") in.act = act_pred<[](u32 a, u32 b) { return a ^ b; }>;
        else if (name == "not") in.act = act_pred<[](u32 a, u32) { return ~a; }>;
        else return false;
        return true;
    }
    if (name == "setp") {
        in.o = {d.operand(args[0], 4), d.operand(args[1], width), d.operand(args[2], width)};
        if (has("and") || has("or") || has("xor")) { in.a = has("and") ? 1 : has("or") ? 2 : 3; in.o.push_back(d.pred(args[3])); }
        switch (type) {
            case S16: in.act = comparison<i16>(parts[1]); break; case U16: in.act = comparison<u16>(parts[1]); break;
            case S32: in.act = comparison<i32>(parts[1]); break; case U32: in.act = comparison<u32>(parts[1]); break;
            case S64: in.act = comparison<i64>(parts[1]); break; case U64: in.act = comparison<u64>(parts[1]); break;
            case F32: in.act = comparison<f32>(parts[1]); break; case F64: in.act = comparison<f64>(parts[1]); break;
        }
        return in.act != nullptr;
    }
    if (name == "selp") {
        take(width, 0, 3); in.o.push_back(d.pred(args[3]));
        in.act = width == 2 ? act_select<u16> : width == 4 ? act_select<u32> : act_select<u64>;
        return true;
    }
    if (name == "ld" || name == "ldu" || name == "st") {
        in.a = has("global") ? GLOBAL : has("shared") || has("shared::cta") ? SHARED : has("local") ? LOCAL : has("param") ? PARAM : GENERIC;
        in.b = u32(type); in.c = has("v8") ? 8 : has("v4") ? 4 : has("v2") ? 2 : 1;
        if (type < 0) return false;
        take(width, 0, 2);
        in.act = name == "st" ? act_store : act_load;
        return true;
    }
    if (name == "atom" || name == "red") {
        static const std::map<string, u32> operations = {{"add", 0}, {"min", 1}, {"max", 2}, {"exch", 3}, {"cas", 4}, {"and", 5}, {"or", 6}, {"xor", 7}, {"inc", 8}};
        in.a = has("global") ? GLOBAL : has("shared") || has("shared::cta") ? SHARED : GENERIC;
        in.b = u32(type); in.d = name == "red"; in.c = 99;
        for (auto& p : parts) if (auto it = operations.find(p); it != operations.end()) in.c = it->second;
        take(width);
        in.act = act_atomic;
        return type >= 0 && in.c != 99;
    }
    if (name == "ldmatrix" || name == "stmatrix") {
        take(4);
        in.a = has("x4") ? 4 : has("x2") ? 2 : 1; in.b = has("trans"); in.c = name == "ldmatrix";
        in.act = act_matrices;
        return true;
    }
    if (name == "shfl") { take(4); in.a = has("idx") ? 0 : has("bfly") ? 1 : has("up") ? 2 : 3; in.act = act_shuffle; return true; }
    if (name == "vote") { in.o = {d.operand(args[0], 4), d.pred(args[1]), d.operand(args[2], 4)}; in.a = has("ballot") ? 0 : has("any") ? 1 : has("all") ? 2 : 3; in.act = act_vote; return true; }
    if (name == "elect") { take(4); in.act = act_elect; return true; }
    if (name == "activemask") { take(4); in.act = act_activemask; return true; }
    if (name == "match") { take(width, 0, 2); in.o.push_back(d.operand(args[2], 4)); in.act = act_match; return has("any"); }
    if (name == "redux") { take(4); in.a = has("add") ? 0 : has("min") ? 1 : has("max") ? 2 : has("and") ? 3 : has("or") ? 4 : 5; in.b = last == "s32"; in.act = act_redux; return true; }
    if (starts("bar.warp")) { take(4); in.act = act_warp_sync; return true; }
    if (name == "bar" || name == "barrier") { if (has("cluster") || has("red")) return false; take(4); in.a = has("arrive"); in.act = act_bar; return true; }
    if (name == "mbarrier") {
        const string& what = parts[1];
        if (what == "init") { take(4); in.act = act_barrier_init; return true; }
        if (what == "inval") { take(4); in.act = act_barrier_inval; return true; }
        if (what == "complete_tx") { take(4); in.act = act_complete; return true; }
        if (what == "expect_tx") { in.o = {d.operand("_", 8), d.operand(args[0], 4), d.operand(args[1], 4)}; in.b = 1; in.act = act_arrive; return true; }
        if (what == "arrive") { in.o = {d.operand(args[0], 8)}; take(4, 1); in.a = 1; in.b = has("expect_tx"); in.act = act_arrive; return true; }
        if (what == "try_wait" || what == "test_wait") { in.a = has("parity"); in.o = {d.operand(args[0], 4), d.operand(args[1], 4), d.operand(args[2], in.a ? 4 : 8)}; in.act = act_wait; return true; }
        return false;
    }
    if (name == "cp") {
        if (starts("cp.async.bulk")) {
            if (starts("cp.async.bulk.prefetch")) { in.act = act_nothing; return true; }
            if (!has("mbarrier::complete_tx::bytes")) return false;
            if (has("tensor")) { in.a = u32(parts[4][0] - '0'); take(4, 0, 3); }
            else { in.o = {d.operand(args[0], 4), d.operand(args[1], 8), d.operand(args[2], 4), d.operand(args[3], 4)}; }
            in.act = act_bulk;
            return true;
        }
        if (starts("cp.async.commit_group")) { in.act = act_copy_commit; return true; }
        if (starts("cp.async.wait_group")) { in.n = atoi(args[0].c_str()); in.act = act_copy_wait; return true; }
        if (starts("cp.async.wait_all")) { in.a = 1; in.act = act_copy_wait; return true; }
        if (starts("cp.async.mbarrier.arrive")) { take(4); in.a = has("noinc"); in.act = act_copy_arrive; return true; }
        if (starts("cp.async")) { take(4, 0, op.find("cache_hint") != string::npos && args.size() < 5 ? 3 : 4); in.act = act_copy; return true; }
        return false;
    }
    if (name == "wgmma") {
        if (parts[1] == "fence") { in.act = act_nothing; return true; }
        if (parts[1] == "commit_group") { in.act = act_product_commit; return true; }
        if (parts[1] == "wait_group") { in.n = atoi(args[0].c_str()); in.act = act_product_wait; return true; }
        const string& shape = parts[4];  // m64n128k16
        size_t n_at = shape.find('n');
        if (shape.rfind("m64", 0) || shape.find("k16") == string::npos || parts[5] != "f32") return false;
        in.a = u32(atoi(shape.c_str() + n_at + 1));
        in.b = last == "bf16";
        in.o = {d.operand(args[0], 4), d.operand(args[1], args[1][0] == '{' ? 4 : 8), d.operand(args[2], 8), d.pred(args[3])};
        if (in.o[0].parts.size() != in.a / 2) return false;
        bool negative = (atoi(args[4].c_str()) < 0) != (atoi(args[5].c_str()) < 0);
        in.n = negative;
        bool from_registers = in.o[1].kind == Kind::vec;
        in.c = from_registers ? 0 : u32(atoi(args[6].c_str()));
        in.d = u32(atoi(args[from_registers ? 6 : 7].c_str()));
        in.act = act_product;
        return true;
    }
    if (starts("fence.proxy.async")) { in.act = act_proxy_fence; return true; }
    if (name == "fence" || name == "membar" || name == "setmaxnreg" || name == "prefetch" || name == "prefetchu" || name == "griddepcontrol" || name == "discard" || name == "applypriority") { in.act = act_nothing; return true; }
    if (name == "nanosleep") { in.act = [](Warp&, const Instruction&, u32) { return YIELD; }; return true; }
    if (name == "createpolicy") { in.act = act_nothing; return true; }
    if (name == "trap") { in.act = act_trap; return true; }
    if (name == "prmt") { take(4); in.act = act_prmt; return parts.size() == 2; }
    if (name == "lop3") { take(4, 0, 4); in.n = strtoll(args[4].c_str(), nullptr, 0); in.act = act_lop3; return true; }
    if (name == "shf") { take(4); in.a = has("l"); in.b = has("wrap"); in.act = act_shf; return true; }
    if (name == "bfe") { take(width, 0, 2); take(4, 2); in.a = u32(type); in.act = act_bfe; return true; }
    if (name == "bfi") { take(width, 0, 3); take(4, 3); in.act = act_bfi; return true; }
    if (last == "bf16x2" || last == "f16x2" || last == "bf16" || last == "f16") {
        static const std::map<string, u32> operations = {{"add", 0}, {"sub", 1}, {"mul", 2}, {"fma", 3}, {"max", 4}, {"min", 5}, {"neg", 6}, {"abs", 7}};
        auto it = operations.find(name);
        if (it == operations.end()) return false;
        in.a = it->second; in.b = last[0] == 'b'; in.c = last.back() == '2' ? 4 : 2;
        take(int(in.c));
        in.act = act_halves;
        return true;
    }
    if (type < 0) return false;
    if (name == "shl" || name == "shr") { take(width, 0, 2); take(4, 2); }
    else if ((name == "mul" || name == "mad") && has("wide")) { take(width * 2, 0, 1); take(width, 1, 3); take(width * 2, 3); }
    else if (name == "popc" || name == "clz") { take(4, 0, 1); take(width, 1); }
    else take(width);
    return arithmetic(in, op, parts, type);
}

// ---------------------------------------------------------------------------------------------------- running

// Which lanes go on: those furthest behind that are not waiting. False if there are none.
bool Warp::choose() {
    for (int i = 0; i < 32; i++) if (active >> i & 1) pcs[i] = pc;
    i32 least = INT32_MAX;
    for (int i = 0; i < 32; i++) if ((live & ~waiting) >> i & 1) least = std::min(least, pcs[i]);
    if (least == INT32_MAX) return false;
    active = 0;
    for (int i = 0; i < 32; i++) if (live >> i & 1 && pcs[i] == least) active |= 1u << i;
    waiting &= ~active;
    pc = least;
    return true;
}

// Instructions that were done before the warp had to wait, or was done with, or had its share.
int Warp::run(int budget) {
    int done = 0;
    waiting = 0;
    if (active != live && !choose()) return 0;
    while (budget-- > 0 && live) {
        const Instruction& in = program->code[size_t(pc)];
        u32 mask = active;
        if (in.guard >= 0) mask &= in.guard_negated ? ~predicates[in.guard] : predicates[in.guard];
        if (launch->options.trace) fprintf(stderr, "%u.%d pc %d %08x %s\n", cta->id[0], index, pc, mask, in.text.substr(0, 120).c_str());
        if (in.flow == Flow::plain) {
            Result result = mask ? in.act(*this, in, mask) : NEXT;
            if (result == BLOCKED) {
                if (active == live) return done;
                waiting |= active;
                if (!choose()) return done;
                continue;
            }
            pc++;
            polling = result == YIELD && in.act == act_wait;
            done += !polling;
            if (result == YIELD) {
                if (active == live) return done;
                waiting |= active;
                if (!choose()) return done;
                continue;
            }
        } else if (in.flow == Flow::branch) {
            done += !polling;  // whoever polls makes no progress
            if (mask == active) pc = in.target;
            else if (!mask) pc++;
            else {
                for (int i = 0; i < 32; i++) if (active >> i & 1) pcs[i] = mask >> i & 1 ? in.target : pc + 1;
                pc++;
                active &= ~mask;
                choose();
                continue;
            }
        } else {
            done++;
            live &= ~mask;
            if (!live) return done;
            if (mask == active) { active = 0; if (!choose()) return done; continue; }
            active &= ~mask;
            pc++;
        }
        if (active != live) choose();
    }
    return done;
}

std::unique_ptr<Cta> Launch::start(u64 number) {
    auto c = std::make_unique<Cta>();
    c->launch = this;
    c->id[0] = u32(number % grid[0]); c->id[1] = u32(number / grid[0] % grid[1]); c->id[2] = u32(number / grid[0] / grid[1]);
    u32 size = DYNAMIC_BASE + (program.static_shared + 1023) / 1024 * 1024 * (program.static_shared ? 1 : 0) + dynamic;
    if (program.static_shared + dynamic > u32(SHARED_SIZE)) FAIL("%u bytes of shared memory", program.static_shared + dynamic);
    c->shared.assign(size, 0xff);
    c->barriers.resize(size / 8 + 1);
    c->writer.resize(size / 16 + 1); c->written.resize(size / 16 + 1);
    if (options.races) c->shadow.resize(size / 4 + 4);
    u32 threads = block[0] * block[1] * block[2];
    for (u32 i = 0; i * 32 < threads; i++) {
        auto w = std::make_unique<Warp>();
        w->launch = this; w->cta = c.get(); w->program = &program; w->index = int(i);
        u32 here = std::min(32u, threads - i * 32);
        w->live = w->active = here == 32 ? ~0u : (1u << here) - 1;
        w->registers = program.image;
        w->predicates = program.predicates;
        w->local.assign(size_t(32) * program.local_bytes, 0xff);
        w->clock.at[i] = 1;
        for (auto& f : program.fixups) for (u32 lane = 0; lane < 32; lane++) {
            u32 thread = i * 32 + lane;
            u32 tid[3] = {thread % block[0], thread / block[0] % block[1], thread / block[0] / block[1]};
            u64 value = 0;
            switch (f.what) {
                case FIX_PARAM: value = u64(parameters) + f.offset; break;
                case FIX_TID: value = tid[f.offset]; break; case FIX_NTID: value = block[f.offset]; break;
                case FIX_CTAID: value = c->id[f.offset]; break; case FIX_NCTAID: value = grid[f.offset]; break;
                case FIX_LANE: value = lane; break; case FIX_WARP: value = i; break; case FIX_SMEM_SIZE: value = dynamic; break;
                case FIX_LANEMASK: { u32 eq = 1u << lane, lt = eq - 1; u32 all[5] = {eq, lt, eq | lt, ~(eq | lt), ~lt}; value = all[f.offset]; break; }
            }
            Operand o; o.at = f.at; o.width = f.width;
            w->put(o, int(lane), value);
        }
        c->warps.push_back(std::move(w));
    }
    if (c->warps.size() > WARPS) FAIL("%zu warps", c->warps.size());
    return c;
}

void Launch::run() {
    random.seed(options.seed);
    const int paces[] = {3, 30, 100};
    haste = paces[below(3)];
    u64 total = u64(grid[0]) * grid[1] * grid[2], next = 0;
    Warp* current = nullptr;
    try {
        int idle = 0;
        while (next < total || !resident.empty()) {
            while (next < total && resident.size() < size_t(options.resident)) resident.push_back(start(next++));
            vector<Warp*> order;
            for (auto& c : resident) for (auto& w : c->warps) if (w->live) order.push_back(w.get());
            std::shuffle(order.begin(), order.end(), random);
            u64 progress = 0;
            for (Warp* w : order) {
                const int shares[] = {20, 200, 2000};
                current = w;
                progress += u64(w->run(shares[below(3)]));
                if (!w->live && (!w->products.empty() || !w->copies.empty())) FAIL("a warp ends with products or copies in flight");
                if (int(below(100)) < haste) {
                    while (!w->cta->copies.empty() && int(below(100)) < haste) { w->cta->land(below(u32(w->cta->copies.size()))); progress++; }
                    while (!w->copies.empty() && int(below(100)) < haste) { w->execute_copies(below(u32(w->copies.size()))); progress++; }
                    while (!w->products.empty() && int(below(100)) < haste) w->execute_product();
                }
            }
            current = nullptr;
            for (size_t i = resident.size(); i--;) {
                Cta& c = *resident[i];
                bool over = true;
                for (auto& w : c.warps) over &= !w->live;
                if (!over) continue;
                if (!c.copies.empty()) FAIL("a thread block ends with copies in flight");
                resident.erase(resident.begin() + i64(i));
                progress++;
            }
            steps += progress;
            if (i64(steps) > options.steps) FAIL("no end after %ld instructions", long(steps));
            idle = progress ? 0 : idle + 1;
            if (idle > 2) {
                bool moved = false;
                for (auto& c : resident) {
                    if (!c->copies.empty()) { c->land(below(u32(c->copies.size()))); moved = true; }
                    for (auto& w : c->warps) if (!w->copies.empty()) { w->execute_copies(below(u32(w->copies.size()))); moved = true; }
                }
                if (!moved) {
                    string where;
                    for (auto& c : resident) for (auto& w : c->warps) if (w->live) where += format("\n  block %u warp %d lanes %08x of %08x: %.150s", c->id[0], w->index, w->active, w->live, program.code[size_t(w->pc)].text.c_str());
                    FAIL("deadlock:%s", where.c_str());
                }
            }
        }
    } catch (const Fault& fault) {
        if (!current) throw;
        FAIL("%s\n  at block %u,%u warp %d lanes %08x, instruction %d: %.300s", fault.what(), current->cta->id[0], current->cta->id[1], current->index, current->active, current->pc,
             program.code[size_t(current->pc)].text.c_str());
    }
}

// ---------------------------------------------------------------------------------------------------- interface

static thread_local string message;
static thread_local vector<Range> ranges;
static Options options{0, 3, 4'000'000'000ll, 0, 1, 0};
static u64 launches = 0, instructions = 0;

extern "C" {
const char* emulator_error() { return message.c_str(); }
void emulator_options(u64 seed, i64 resident, i64 steps, i32 races, i32 proxies, i32 trace) { options = {seed, resident, steps, races, proxies, trace}; launches = 0; }
void emulator_ranges(const u64* pairs, i64 count) { ranges.clear(); for (i64 i = 0; i < count; i++) ranges.push_back({pairs[2 * i], pairs[2 * i + 1]}); }
u64 emulator_instructions() { return instructions; }

void* emulator_parse(const char* text) {
    try { return new vector<std::unique_ptr<Program>>(parse(text)); }
    catch (const std::exception& fault) { message = fault.what(); return nullptr; }
}
const void* emulator_find(void* programs, const char* name) {
    auto& all = *static_cast<vector<std::unique_ptr<Program>>*>(programs);
    for (auto& p : all) if (p->name == name) return p.get();
    return all.size() == 1 ? all[0].get() : nullptr;
}
i32 emulator_launch(const void* which, const u32* grid, const u32* block, u64 dynamic, void** arguments) {
    try {
        const Program& p = *static_cast<const Program*>(which);
        Launch launch(p);
        for (int i = 0; i < 3; i++) { launch.grid[i] = grid[i]; launch.block[i] = block[i]; }
        launch.dynamic = u32(dynamic);
        launch.storage.assign(p.parameter_bytes + 256, 0);
        launch.parameters = reinterpret_cast<u8*>((u64(launch.storage.data()) + 63) / 64 * 64);
        for (size_t i = 0; i < p.parameters.size(); i++) memcpy(launch.parameters + p.parameters[i].offset, arguments[i], p.parameters[i].size);
        launch.ranges = ranges;
        launch.options = options;
        launch.options.seed = options.seed * 1000003 + launches++;
        if (!grid[0] || !grid[1] || !grid[2]) FAIL("empty grid");
        launch.run();
        instructions += launch.steps;
        return 0;
    } catch (const std::exception& fault) { message = fault.what(); return 1; }
}
}
