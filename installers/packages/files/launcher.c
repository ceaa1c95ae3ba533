// Starts the Python beside it: `Switchyard.exe` without a console for the window, `switchyard-cli.exe` with one for
// commands. Arguments are handed on unchanged.
#define UNICODE
#define _UNICODE
#include <windows.h>
#include <wchar.h>

#ifdef CONSOLE
#define PROGRAM L"python\\python.exe"
#else
#define PROGRAM L"python\\pythonw.exe"
#endif
#define LONGEST 32768

static wchar_t folder[LONGEST], command[LONGEST];

static int fail(const wchar_t *sentence) {
#ifdef CONSOLE
    DWORD written;
    WriteConsoleW(GetStdHandle(STD_ERROR_HANDLE), sentence, (DWORD)wcslen(sentence), &written, NULL);
    WriteConsoleW(GetStdHandle(STD_ERROR_HANDLE), L"\n", 1, &written, NULL);
#else
    MessageBoxW(NULL, sentence, L"Switchyard", MB_ICONERROR);
#endif
    return 2;
}

// What follows the program's own name on the command line: a name in quotes ends with the next one.
static const wchar_t *arguments(const wchar_t *line) {
    if (*line == L'"') {
        for (++line; *line && *line != L'"'; ++line);
        if (*line) ++line;
    } else {
        for (; *line && *line != L' ' && *line != L'\t'; ++line);
    }
    return line;
}

static int start(void) {
    DWORD length = GetModuleFileNameW(NULL, folder, LONGEST);
    if (length == 0 || length >= LONGEST) return fail(L"Switchyard cannot find its own folder: install it in a shorter path.");
    *wcsrchr(folder, L'\\') = 0;
    int needed = swprintf(command, LONGEST, L"\"%ls\\" PROGRAM L"\" -I -X utf8 \"%ls\\start.py\"%ls", folder, folder,
                          arguments(GetCommandLineW()));
    if (needed < 0 || needed >= LONGEST) return fail(L"These are too many files at once: open fewer.");
    STARTUPINFOW how = {.cb = sizeof how};
    PROCESS_INFORMATION started;
    if (!CreateProcessW(NULL, command, NULL, NULL, TRUE, 0, NULL, NULL, &how, &started))
        return fail(L"Switchyard's own Python does not start: install Switchyard again; models and chats stay.");
    DWORD code = 0;
#ifdef CONSOLE
    SetConsoleCtrlHandler(NULL, TRUE);  // Ctrl-C is for the command
#endif
    WaitForSingleObject(started.hProcess, INFINITE);
    GetExitCodeProcess(started.hProcess, &code);
    return (int)code;
}

#ifdef CONSOLE
int wmain(void) { return start(); }
#else
int WINAPI wWinMain(HINSTANCE here, HINSTANCE before, PWSTR line, int show) {
    (void)here, (void)before, (void)line, (void)show;
    return start();
}
#endif
