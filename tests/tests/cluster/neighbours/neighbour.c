/*
 * A library that replaces functions of the server as pagevault does, for tests. The environment
 * variable NEIGHBOUR says how:
 *
 *   calls   its own pread, pwrite and their like, in the server's GOT; each calls what was there
 *   chain   a write function in the table of the storage manager, which calls what was there
 *   bypass  one that calls PostgreSQL's own
 */
#define _GNU_SOURCE
#include "postgres.h"

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include "fmgr.h"
#include "storage/md.h"
#include "storage/smgr.h"

PG_MODULE_MAGIC;

/* The main program, which dl_iterate_phdr names first. */
static struct dl_phdr_info program;

static int
first(struct dl_phdr_info *info, size_t size, void *data)
{
	program = *info;
	return 1;
}

static void
say_once(bool *said, const char *what)
{
	char		line[64];

	if (*said)
		return;
	*said = true;
	snprintf(line, sizeof(line), "neighbour: %s\n", what);
	if (write(STDERR_FILENO, line, strlen(line)) < 0)
		return;
}

static void
replace(void **word, void *with)
{
	uintptr_t	page = (uintptr_t) word & ~(uintptr_t) 4095;

	if (mprotect((void *) page, 8192, PROT_READ | PROT_WRITE) != 0)
		elog(FATAL, "neighbour: mprotect: %m");
	*word = with;
}

static bool
is_own(void *address)
{
	uintptr_t	at = (uintptr_t) address - program.dlpi_addr;

	for (int i = 0; i < program.dlpi_phnum; i++)
	{
		const ElfW(Phdr) *segment = &program.dlpi_phdr[i];

		if (segment->p_type == PT_LOAD && at - segment->p_vaddr < segment->p_memsz)
			return true;
	}
	return false;
}

/* Calls of the C library */

#define CALL(result, name, parameters, arguments) \
	static result (*old_##name) parameters; \
	static result new_##name parameters \
	{ \
		static bool said; \
		say_once(&said, #name); \
		return old_##name arguments; \
	}

CALL(ssize_t, pread, (int fd, void *to, size_t size, off_t at), (fd, to, size, at))
CALL(ssize_t, pwrite, (int fd, const void *from, size_t size, off_t at), (fd, from, size, at))
CALL(ssize_t, preadv, (int fd, const struct iovec *to, int n, off_t at), (fd, to, n, at))
CALL(ssize_t, pwritev, (int fd, const struct iovec *from, int n, off_t at), (fd, from, n, at))
CALL(ssize_t, read, (int fd, void *to, size_t size), (fd, to, size))

#define REPLACED(name) {#name, (void *) new_##name, (void **) &old_##name}, \
	{#name "64", (void *) new_##name, (void **) &old_##name}

static const struct
{
	const char *name;
	void	   *new;
	void	  **old;
}			calls[] = {
	REPLACED(pread), REPLACED(pwrite), REPLACED(preadv), REPLACED(pwritev), REPLACED(read)
};

static void
replace_in(const ElfW(Rela) *relocations, size_t size, const ElfW(Sym) *symbols,
		   const char *names)
{
	for (size_t i = 0; i < size / sizeof(*relocations); i++)
	{
		const char *name = names + symbols[ELF64_R_SYM(relocations[i].r_info)].st_name;
		void	  **slot = (void **) (program.dlpi_addr + relocations[i].r_offset);

		if (ELF64_R_SYM(relocations[i].r_info) == 0)
			continue;
		for (size_t call = 0; call < lengthof(calls); call++)
		{
			if (strcmp(name, calls[call].name) != 0 || *slot == calls[call].new)
				continue;
			/* A slot that was never used leads to the program's own table of calls. */
			*calls[call].old = is_own(*slot) ? dlsym(RTLD_NEXT, name) : *slot;
			replace(slot, calls[call].new);
		}
	}
}

static void
replace_calls(void)
{
	const ElfW(Rela) *plt = NULL, *data = NULL;
	size_t		plt_size = 0, data_size = 0;
	const ElfW(Sym) *symbols = NULL;
	const char *names = NULL;

	for (int i = 0; i < program.dlpi_phnum; i++)
	{
		const ElfW(Dyn) *entry;

		if (program.dlpi_phdr[i].p_type != PT_DYNAMIC)
			continue;
		entry = (const ElfW(Dyn) *) (program.dlpi_addr + program.dlpi_phdr[i].p_vaddr);
		for (; entry->d_tag != DT_NULL; entry++)
		{
			/* glibc has made addresses of them. */
			void	   *at = (void *) entry->d_un.d_ptr;

			if (entry->d_tag == DT_JMPREL)
				plt = at;
			else if (entry->d_tag == DT_PLTRELSZ)
				plt_size = entry->d_un.d_val;
			else if (entry->d_tag == DT_RELA)
				data = at;
			else if (entry->d_tag == DT_RELASZ)
				data_size = entry->d_un.d_val;
			else if (entry->d_tag == DT_SYMTAB)
				symbols = at;
			else if (entry->d_tag == DT_STRTAB)
				names = at;
		}
	}
	if (symbols == NULL || names == NULL)
		elog(FATAL, "neighbour: no symbols");
	replace_in(plt, plt_size, symbols, names);
	replace_in(data, data_size, symbols, names);
}

/* The storage manager */

#if PG_VERSION_NUM >= 170000
#define WRITE mdwritev
typedef void (*Write) (SMgrRelation, ForkNumber, BlockNumber, const void **, BlockNumber, bool);
#define PARAMETERS (SMgrRelation relation, ForkNumber fork, BlockNumber block, \
					const void **pages, BlockNumber n, bool skip)
#define ARGUMENTS (relation, fork, block, pages, n, skip)
#elif PG_VERSION_NUM >= 160000
#define WRITE mdwrite
typedef void (*Write) (SMgrRelation, ForkNumber, BlockNumber, const void *, bool);
#define PARAMETERS (SMgrRelation relation, ForkNumber fork, BlockNumber block, \
					const void *page, bool skip)
#define ARGUMENTS (relation, fork, block, page, skip)
#else
#define WRITE mdwrite
typedef void (*Write) (SMgrRelation, ForkNumber, BlockNumber, char *, bool);
#define PARAMETERS (SMgrRelation relation, ForkNumber fork, BlockNumber block, \
					char *page, bool skip)
#define ARGUMENTS (relation, fork, block, page, skip)
#endif

/* Its place in f_smgr (smgr.c) */
#if PG_VERSION_NUM >= 180000
#define WRITE_PLACE 13
#elif PG_VERSION_NUM >= 160000
#define WRITE_PLACE 11
#else
#define WRITE_PLACE 10
#endif
#define OPEN_PLACE 2

static Write old_write;

static void
chaining PARAMETERS
{
	static bool said;

	say_once(&said, "write");
	old_write ARGUMENTS;
}

static void
bypassing PARAMETERS
{
	WRITE ARGUMENTS;
}

static void
replace_write(Write with)
{
	for (int i = 0; i < program.dlpi_phnum; i++)
	{
		const ElfW(Phdr) *segment = &program.dlpi_phdr[i];
		void	  **words = (void **) (program.dlpi_addr + segment->p_vaddr);

		if (segment->p_type != PT_LOAD || (segment->p_flags & PF_R) == 0)
			continue;
		for (size_t at = 0; at + 1 < segment->p_filesz / sizeof(void *); at++)
		{
			void	  **table = words + at - OPEN_PLACE;

			if (words[at] != (void *) mdopen || words[at + 1] != (void *) mdclose)
				continue;
			old_write = (Write) table[WRITE_PLACE];
			replace(&table[WRITE_PLACE], (void *) with);
			return;
		}
	}
	elog(FATAL, "neighbour: no table of the storage manager");
}

void		_PG_init(void);

void
_PG_init(void)
{
	const char *how = getenv("NEIGHBOUR");

	dl_iterate_phdr(first, NULL);
	if (how == NULL)
		elog(FATAL, "neighbour: NEIGHBOUR is missing");
	else if (strcmp(how, "calls") == 0)
		replace_calls();
	else if (strcmp(how, "chain") == 0)
		replace_write(chaining);
	else if (strcmp(how, "bypass") == 0)
		replace_write(bypassing);
}
