/*
 * The program that tests/interposition.rs interposes on. It has what PostgreSQL has: a private
 * constant table of exported functions that is called through, an exported constant struct with
 * a callback, and calls to libc through its GOT. Prints what it sees, before and after.
 *
 * Usage: program LIBRARY SCENARIO MAPS_BEFORE MAPS_AFTER
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* Exported; volatile keeps the compiler from folding identical bodies or calls. */
static volatile int zero = 0;
int shelf_open(int x) { return x + 1 + zero; }
int shelf_read(int x) { return x + 2 + zero; }
int shelf_write(int x) { return x + 3 + zero; }
int shelf_close(int x) { return x + 4 + zero; }
int twin_left(int x) { return x + 5 + zero; }
int twin_right(int x) { return x + 6 + zero; }
int lonely(int x) { return x + 7 + zero; }

struct shelf
{
	int (*open) (int);
	void (*unused) (void);
	int (*read) (int);
	int (*write) (int);
	int (*close) (int);
};

static const struct shelf shelves[] = {
	{shelf_open, NULL, shelf_read, shelf_write, shelf_close},
};

struct twin
{
	int (*left) (int);
	int (*right) (int);
};

/* Two tables of the same functions, further apart than a search window. */
static const struct
{
	struct twin first;
	long gap[64];
	struct twin second;
} twins = {{twin_left, twin_right}, {0}, {twin_left, twin_right}};

static int on_complete(int x) { return x + 8 + zero; }

struct callbacks
{
	int (*complete) (int);
	int (*local) (int);
	int (*report) (int);
};

extern const struct callbacks completion;
const struct callbacks completion = {on_complete, NULL, on_complete};
const int answer = 42;

static void
observe(const char *when)
{
	/* Volatile, so that the compiler cannot see through them and calls stay indirect. */
	const struct shelf *volatile shelf = shelves;
	const struct twin *volatile twin = zero ? &twins.second : &twins.first;
	const struct callbacks *volatile callbacks = &completion;
	char path[] = "/tmp/interpose-XXXXXX";
	char bytes[4] = "....";
	int fd = mkstemp(path);
	ssize_t wrote, got;
	/* A function's address: a GLOB_DAT slot, or a canonical PLT entry without PIE. */
	ssize_t (*volatile read_pointer) (int, void *, size_t) = read;
	off_t (*volatile lseek_pointer) (int, off_t, int) = lseek;
	off_t end;

	unlink(path);
	wrote = pwrite(fd, "wxyz", 4, 0);
	got = read(fd, bytes, 2);
	got += read_pointer(fd, bytes + 2, 2);
	end = lseek(fd, 0, SEEK_END);
	end += lseek_pointer(fd, 0, SEEK_END);
	printf("%s shelf %d %d %d %d twin %d complete %d report %d wrote %zd read %zd %.4s end %ld\n",
		   when,
		   shelf->open(100), shelf->read(100), shelf->write(100), shelf->close(100),
		   twin->left(100) + twin->right(100), callbacks->complete(100), callbacks->report(100),
		   wrote, got, bytes, (long) end);
	close(fd);
}

static void
save_maps(const char *path)
{
	static char text[1 << 20];
	size_t len = 0;
	ssize_t got;
	int fd = open("/proc/self/maps", O_RDONLY);

	/* pread, which no scenario replaces */
	while ((got = pread(fd, text + len, sizeof(text) - len, len)) > 0)
		len += got;
	close(fd);
	fd = open(path, O_CREAT | O_WRONLY | O_TRUNC, 0600);
	if (len == 0 || write(fd, text, len) != (ssize_t) len)
		exit(3);
	close(fd);
}

int
main(int argc, char **argv)
{
	void *library;
	const char *(*interpose) (const char *);
	const char *failure;

	if (argc != 5)
		return 2;
	/* "early": the lazy slots have not been used when they are replaced. */
	if (getenv("EARLY") == NULL)
		observe("before");
	library = dlopen(argv[1], RTLD_NOW);
	if (library == NULL)
	{
		fprintf(stderr, "%s\n", dlerror());
		return 2;
	}
	interpose = (const char *(*) (const char *)) dlsym(library, "interpose");
	if (interpose == NULL)
		return 2;
	save_maps(argv[3]);
	failure = interpose(argv[2]);
	save_maps(argv[4]);
	if (failure != NULL)
		printf("error %s\n", failure);
	observe("after");
	/* A call must not undo the replacement (a lazy stub that is forwarded to would). */
	observe("later");
	return lonely(answer) == 49 ? 0 : 4;
}
