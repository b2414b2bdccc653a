// The operations of filebench's personalities varmail, fileserver and webserver, in threads; those that never sync
// think for 5 ms after each loop, since they would have nothing to wait for but the processor.
//
//     personalities prepare DIRECTORY PERSONALITY FILES
//     personalities run DIRECTORY PERSONALITY FILES THREADS SECONDS SEED
//
// `run` prints JSON: loops of the personality, its operations (as filebench counts them, a line of the personality
// each), syncs, and the seconds it took.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { LARGEST = 1 << 20 };

struct thread {
    pthread_t id;
    uint64_t random;
    uint64_t loops, operations, syncs;
    char *buffer;
};

struct personality {
    const char *name;
    // Mean bytes of a file, and of what is appended; microseconds of thought after a loop.
    int file, append, think;
    void (*loop)(struct thread *);
};

static const char *directory;
static const struct personality *personality;
static int files;
static atomic_bool over;

static void die(const char *what, const char *path) {
    fprintf(stderr, "%s %s: %s\n", what, path, strerror(errno));
    exit(1);
}

static uint64_t draw(struct thread *self) {
    self->random ^= self->random << 13;
    self->random ^= self->random >> 7;
    self->random ^= self->random << 17;
    return self->random;
}

// Bytes about a mean: from half of it to half more.
static int about(struct thread *self, int mean) {
    return mean / 2 + (int)(draw(self) % (uint64_t)(mean + 1));
}

static void name_of(char *path, uint64_t number) {
    sprintf(path, "%s/d%d/f%d", directory, (int)(number % 20), (int)number);
}

static void any_name(struct thread *self, char *path) {
    name_of(path, draw(self) % (uint64_t)files);
}

static int open_file(struct thread *self, const char *path, int flags) {
    int file = open(path, flags | O_CREAT, 0644);
    if (file < 0) die("open", path);
    self->operations++;
    return file;
}

// A file made anew: one cut to nothing and written again would be written out by ext4 when it is closed.
static int new_file(struct thread *self, const char *path) {
    if (unlink(path) && errno != ENOENT) die("unlink", path);
    return open_file(self, path, O_WRONLY);
}

static void close_file(struct thread *self, int file) {
    close(file);
    self->operations++;
}

static void write_some(struct thread *self, int file, int length) {
    // Other bytes each time, which a disk could not hold as zeroes.
    for (int at = 0; at < length; at += 512) *(uint64_t *)(self->buffer + at) = draw(self);
    if (write(file, self->buffer, (size_t)length) != length) die("write", personality->name);
    self->operations++;
}

static void read_whole(struct thread *self, int file) {
    while (read(file, self->buffer, LARGEST) > 0) continue;
    self->operations++;
}

static void sync_file(struct thread *self, int file) {
    if (fsync(file)) die("fsync", personality->name);
    self->operations++;
    self->syncs++;
}

static void delete_file(struct thread *self, const char *path) {
    if (unlink(path) && errno != ENOENT) die("unlink", path);
    self->operations++;
}

static void varmail(struct thread *self) {
    char path[4096];
    any_name(self, path);
    delete_file(self, path);
    any_name(self, path);
    int file = new_file(self, path);
    write_some(self, file, about(self, personality->append));
    sync_file(self, file);
    close_file(self, file);
    any_name(self, path);
    file = open_file(self, path, O_RDWR | O_APPEND);
    read_whole(self, file);
    write_some(self, file, about(self, personality->append));
    sync_file(self, file);
    close_file(self, file);
    any_name(self, path);
    file = open_file(self, path, O_RDONLY);
    read_whole(self, file);
    close_file(self, file);
}

static void fileserver(struct thread *self) {
    char path[4096];
    struct stat found;
    any_name(self, path);
    int file = new_file(self, path);
    write_some(self, file, about(self, personality->file));
    close_file(self, file);
    any_name(self, path);
    file = open_file(self, path, O_WRONLY | O_APPEND);
    write_some(self, file, about(self, personality->append));
    close_file(self, file);
    any_name(self, path);
    file = open_file(self, path, O_RDONLY);
    read_whole(self, file);
    close_file(self, file);
    any_name(self, path);
    delete_file(self, path);
    any_name(self, path);
    stat(path, &found);
    self->operations++;
}

static void webserver(struct thread *self) {
    char path[4096];
    for (int number = 0; number < 10; number++) {
        any_name(self, path);
        int file = open_file(self, path, O_RDONLY);
        read_whole(self, file);
        close_file(self, file);
    }
    sprintf(path, "%s/log", directory);
    int file = open(path, O_WRONLY | O_APPEND | O_CREAT, 0644);
    if (file < 0) die("open", path);
    write_some(self, file, about(self, personality->append));
    close(file);
}

static const struct personality personalities[] = {
    {"varmail", 16 << 10, 16 << 10, 0, varmail},
    {"fileserver", 128 << 10, 16 << 10, 5000, fileserver},
    {"webserver", 16 << 10, 16 << 10, 5000, webserver},
};

static void begin(struct thread *self, uint64_t seed) {
    memset(self, 0, sizeof *self);
    self->random = seed * 0x9e3779b97f4a7c15u + 0x2545f4914f6cdd1du;
    self->buffer = malloc(LARGEST);
    if (!self->buffer) die("malloc", "buffer");
    for (int at = 0; at < LARGEST; at += 8) *(uint64_t *)(self->buffer + at) = draw(self);
}

static void *work(void *argument) {
    struct thread *self = argument;
    while (!atomic_load(&over)) {
        personality->loop(self);
        self->loops++;
        if (personality->think) usleep((useconds_t)personality->think);
    }
    return NULL;
}

static void prepare(void) {
    char path[4096];
    struct thread self;
    begin(&self, 1);
    for (int number = 0; number < 20; number++) {
        sprintf(path, "%s/d%d", directory, number);
        if (mkdir(path, 0755)) die("mkdir", path);
    }
    for (int number = 0; number < files; number++) {
        name_of(path, (uint64_t)number);
        int file = open_file(&self, path, O_WRONLY);
        write_some(&self, file, about(&self, personality->file));
        close(file);
    }
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void run(int count, double seconds, uint64_t seed) {
    struct thread *threads = calloc((size_t)count, sizeof *threads);
    if (!threads) die("malloc", "threads");
    double began = now();
    for (int number = 0; number < count; number++) {
        begin(&threads[number], seed * 1000 + (uint64_t)number);
        if (pthread_create(&threads[number].id, NULL, work, &threads[number])) die("thread", personality->name);
    }
    usleep((useconds_t)(seconds * 1e6));
    atomic_store(&over, true);
    uint64_t loops = 0, operations = 0, syncs = 0;
    for (int number = 0; number < count; number++) {
        pthread_join(threads[number].id, NULL);
        loops += threads[number].loops;
        operations += threads[number].operations;
        syncs += threads[number].syncs;
    }
    double took = now() - began;
    printf("{\"loops\": %lu, \"operations\": %lu, \"syncs\": %lu, \"seconds\": %.3f, "
           "\"operations_per_second\": %.1f}\n",
           loops, operations, syncs, took, (double)operations / took);
}

int main(int count, char **words) {
    if (count < 5) {
        fprintf(stderr, "usage: personalities prepare|run DIRECTORY PERSONALITY FILES [THREADS SECONDS SEED]\n");
        return 2;
    }
    directory = words[2];
    for (size_t number = 0; number < sizeof personalities / sizeof *personalities; number++)
        if (!strcmp(words[3], personalities[number].name)) personality = &personalities[number];
    files = atoi(words[4]);
    if (!personality || files < 1) return fprintf(stderr, "no such personality, or no files\n"), 2;
    if (!strcmp(words[1], "prepare")) prepare();
    else if (count == 8) run(atoi(words[5]), atof(words[6]), (uint64_t)atoi(words[7]));
    else return 2;
    return 0;
}
