/*
 * A PKCS#11 module that forwards to another one, REAL_MODULE, and has defects:
 *
 * LOAD          when it is loaded: print (to standard output and error), fork, hang, crash
 * FAULT         NAME=hang, NAME=crash, or NAME=VALUE: what happens in the function C_NAME, whose
 *               return value is given in hexadecimal; NAME=call only writes to CALLS
 * TIMES         only the first calls of it do so; then it is forwarded
 * CALLS         a file to which each call of C_NAME adds a byte
 * TOKEN_FLAGS   flags, in hexadecimal, that all tokens have in addition
 * CHILD         a file for the number of the process that LOAD=fork makes, or of this process
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef unsigned long value;
typedef value (*function)(value, value, value, value, value, value);

/* CK_FUNCTION_LIST of version 2 (pkcs11f.h). No forwarded function has more than 6 arguments. */
static struct list {
    unsigned char version[2];
    function functions[68];
} *real, mine;

static const struct { const char *name; int place; } NAMES[] = {
    {"Initialize", 0}, {"GetTokenInfo", 6}, {"OpenSession", 12}, {"Login", 18},
    {"FindObjectsInit", 26}, {"EncryptInit", 29}, {"Encrypt", 30}, {"DecryptInit", 33},
    {"Decrypt", 34}, {"GenerateKey", 58},
};

static int place = -1;
static const char *fault;

static void tell_process(int number)
{
    FILE *file = getenv("CHILD") ? fopen(getenv("CHILD"), "w") : NULL;
    if (file) {
        fprintf(file, "%d", number);
        fclose(file);
    }
}

static void misbehave(const char *how)
{
    tell_process(getpid());
    if (!strcmp(how, "crash"))
        abort();
    while (!strcmp(how, "hang"))
        pause();
}

static value faulty(value a, value b, value c, value d, value e, value f)
{
    struct stat calls = {0};
    const char *path = getenv("CALLS"), *times = getenv("TIMES");
    if (path) {
        int file = open(path, O_WRONLY | O_APPEND | O_CREAT, 0600);
        if (write(file, ".", 1) != 1 || fstat(file, &calls) != 0)
            abort();
        close(file);
    }
    if (!strcmp(fault, "call") || (times && calls.st_size > atoi(times)))
        return real->functions[place](a, b, c, d, e, f);
    misbehave(fault);
    return strtoul(fault, NULL, 16);
}

static value token_info(value slot, value info, value c, value d, value e, value f)
{
    value result = real->functions[6](slot, info, c, d, e, f);
    /* After label, manufacturer, model and serial number (CK_TOKEN_INFO). */
    if (result == 0)
        *(value *)(info + 96) |= strtoul(getenv("TOKEN_FLAGS"), NULL, 16);
    return result;
}

__attribute__((constructor)) static void loaded(void)
{
    const char *how = getenv("LOAD");
    if (!how)
        return;
    if (!strcmp(how, "print")) {
        printf("{\"Failed\":{\"failure\":{}}}\n");
        fflush(stdout);
        if (write(1, "{}", 2) != 2 || write(2, "noise\n", 6) != 6)
            abort();
    } else if (!strcmp(how, "fork")) {
        int child = fork();
        while (child == 0)
            pause();
        tell_process(child);
    } else {
        misbehave(how);
    }
}

value C_GetFunctionList(struct list **result)
{
    void *library = dlopen(getenv("REAL_MODULE"), RTLD_NOW);
    value (*get)(struct list **) =
        library ? (value (*)(struct list **))dlsym(library, "C_GetFunctionList") : NULL;
    const char *text = getenv("FAULT");
    if (!get || get(&real) != 0)
        return 5;
    mine = *real;
    if (getenv("TOKEN_FLAGS"))
        mine.functions[6] = token_info;
    if (text) {
        fault = strchr(text, '=') + 1;
        for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++)
            if (!strncmp(text, NAMES[i].name, fault - text - 1) &&
                strlen(NAMES[i].name) == (size_t)(fault - text - 1))
                place = NAMES[i].place;
        if (place < 0)
            abort();
        mine.functions[place] = faulty;
    }
    *result = &mine;
    return 0;
}
