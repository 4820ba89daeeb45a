/* The address from the library's symbol table in memory, past the linker. */
#include "layer.h"
#include <link.h>
#include <string.h>
int main(int argc, char **argv) {
    struct link_map *map = dlopen(SONAME, RTLD_NOW);
    const char *strings = NULL;
    const ElfW(Sym) *symbols = NULL;
    const unsigned *hash = NULL;
    Target *target = NULL;
    ready();
    for (const ElfW(Dyn) *entry = map->l_ld; entry->d_tag != DT_NULL; entry++) {
        if (entry->d_tag == DT_STRTAB)
            strings = (const char *)entry->d_un.d_ptr;
        if (entry->d_tag == DT_SYMTAB)
            symbols = (const ElfW(Sym) *)entry->d_un.d_ptr;
        if (entry->d_tag == DT_GNU_HASH)
            hash = (const unsigned *)entry->d_un.d_ptr;
    }
    /* Four words, the filter, the buckets, and for every symbol from hash[1] on its hash, whose lowest bit ends a chain. */
    const unsigned *buckets = hash + 4 + 2 * hash[2], *chains = buckets + hash[0] - hash[1];
    for (unsigned bucket = 0; bucket < hash[0]; bucket++) {
        unsigned index = buckets[bucket];
        do {
            if (index && !strcmp(strings + symbols[index].st_name, TEXT(TARGET)))
                target = (Target *)(map->l_addr + symbols[index].st_value);
        } while (index && !(chains[index++] & 1));
    }
    calls(target);
    finish(argv);
}
