/* Stands in for Frida's devkit, which no package registry has: the functions of gum that the hook's
 * engine calls, and no more. It proves that the hook links with `--features frida` and makes its
 * calls in the right order with the right arguments. It proves nothing about how Frida moves code:
 * what is moved here is the plainest beginning of a function (`push`, `mov` between registers,
 * `sub rsp`), and everything else is refused, as Frida refuses what it cannot move. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { JUMP = 5, FAR_JUMP = 14, MOST = 32, PAGE = 4096, OK = 0, WRONG_SIGNATURE = -1 };

typedef struct {
    uint8_t *function;
    const uint8_t *replacement;
} Pending;

static int is_set_up, references, depth, pending;
static Pending jumps[256];

void gum_init_embedded(void) { is_set_up = 1; }

/* The engine keeps its handle forever. */
void gum_deinit_embedded(void) { abort(); }

void *gum_interceptor_obtain(void) {
    if (!is_set_up) abort();
    references++;
    return &references;
}

void *_frida_g_object_ref(void *object) {
    references++;
    return object;
}

void _frida_g_object_unref(void *object) {
    if (--references == 0) abort();
}

/* Length of an instruction that runs anywhere the same; 0 for any other. */
static size_t length_of(const uint8_t *at) {
    if (at[0] >= 0x50 && at[0] <= 0x57) return 1;
    if (at[0] == 0x41 && at[1] >= 0x50 && at[1] <= 0x57) return 2;
    size_t prefix = at[0] >= 0x48 && at[0] <= 0x4f;
    if (at[prefix] == 0x89 && at[prefix + 1] >= 0xc0) return prefix + 2;
    if (at[0] == 0x48 && at[1] == 0x83 && at[2] == 0xec) return 4;
    if (at[0] == 0x48 && at[1] == 0x81 && at[2] == 0xec) return 7;
    return 0;
}

/* A jump to anywhere: through the eight bytes behind it. */
static void far_jump(uint8_t *at, const void *to) {
    static const uint8_t through[] = {0xff, 0x25, 0, 0, 0, 0};
    memcpy(at, through, sizeof through);
    memcpy(at + sizeof through, &to, sizeof to);
}

/* Memory near enough for a jump of five bytes. */
static uint8_t *near_memory(const uint8_t *function) {
    for (uintptr_t at = (uintptr_t)function / PAGE * PAGE; at > (uintptr_t)function - (1u << 30); at -= 16 * PAGE) {
        void *memory = mmap((void *)at, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        if (memory != MAP_FAILED) return memory;
    }
    return NULL;
}

void gum_interceptor_begin_transaction(void *self) { depth++; }

int gum_interceptor_replace_fast(void *self, void *function, void *replacement, void **original) {
    if (self != &references || !depth || pending == sizeof jumps / sizeof *jumps) abort();
    size_t moved = 0, length;
    while (moved < JUMP) {
        if (!(length = length_of((uint8_t *)function + moved))) return WRONG_SIGNATURE;
        moved += length;
    }
    uint8_t *place = near_memory(function);
    if (!place) return WRONG_SIGNATURE;
    /* The moved instructions and the way back, then the way to the replacement. */
    memcpy(place, function, moved);
    far_jump(place + moved, (uint8_t *)function + moved);
    far_jump(place + 2 * MOST, replacement);
    *original = place;
    jumps[pending++] = (Pending){function, place + 2 * MOST};
    return OK;
}

void gum_interceptor_end_transaction(void *self) {
    if (--depth) return;
    for (; pending; pending--) {
        Pending jump = jumps[pending - 1];
        uint8_t *first = (uint8_t *)((uintptr_t)jump.function / PAGE * PAGE);
        size_t bytes = jump.function + JUMP - first;
        int32_t distance = (int32_t)(jump.replacement - (jump.function + JUMP));
        if (mprotect(first, bytes, PROT_READ | PROT_WRITE | PROT_EXEC)) continue;
        jump.function[0] = 0xe9;
        memcpy(jump.function + 1, &distance, sizeof distance);
        mprotect(first, bytes, PROT_READ | PROT_EXEC);
    }
}
