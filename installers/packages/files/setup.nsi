; The installer for Windows: for one user, without an administrator.  `packages/windows.py` fills the names in @ in.
Unicode true
Target amd64-unicode
!include "MUI2.nsh"
!include "LogicLib.nsh"
!include "FileFunc.nsh"
!include "nsDialogs.nsh"
!include "x64.nsh"
!include "WinVer.nsh"

!define NAME "Switchyard"
!define VERSION "@VERSION@"
!define UNINSTALL "Software\Microsoft\Windows\CurrentVersion\Uninstall\${NAME}"
!define CLASSES "Software\Classes"
Var Models ; what is handed on about them: --models or --keep-models
Var Chats
Var ModelsBox
Var ChatsBox

Name "${NAME}"
OutFile "@OUTPUT@"
RequestExecutionLevel user
InstallDir "$LOCALAPPDATA\Programs\${NAME}"
InstallDirRegKey HKCU "${UNINSTALL}" "InstallLocation"
SetCompressor @COMPRESSOR@
ManifestDPIAware true
BrandingText "${NAME} ${VERSION}"
VIProductVersion "@VERSION@.0"
VIAddVersionKey ProductName "${NAME}"
VIAddVersionKey ProductVersion "${VERSION}"
VIAddVersionKey FileVersion "${VERSION}"
VIAddVersionKey FileDescription "${NAME} Setup"
VIAddVersionKey LegalCopyright "The Switchyard developers, Apache-2.0"

!define MUI_ICON "@ICON@"
!define MUI_UNICON "@ICON@"
!define MUI_ABORTWARNING
!define MUI_FINISHPAGE_RUN "$INSTDIR\Switchyard.exe"
!insertmacro MUI_PAGE_LICENSE "@LICENCE@"
!insertmacro MUI_PAGE_DIRECTORY
!insertmacro MUI_PAGE_INSTFILES
!insertmacro MUI_PAGE_FINISH
UninstPage custom un.Ask un.Answer
!insertmacro MUI_UNPAGE_INSTFILES
!insertmacro MUI_LANGUAGE "English"

; Windows moves a program that runs, but lets nobody write to it: ask to close it, and in silence stop with 3. A virus
; scanner that holds it lets go in 2 s.
!macro free_to_write FILE
    StrCpy $1 4
    ${DoWhile} $1 > 0
        ClearErrors
        ${If} ${FileExists} "${FILE}"
            FileOpen $0 "${FILE}" a
            FileClose $0
        ${EndIf}
        ${IfNot} ${Errors}
            StrCpy $1 -1
        ${Else}
            Sleep 500
            IntOp $1 $1 - 1
        ${EndIf}
    ${Loop}
!macroend
!macro close_running
    ${Do}
        !insertmacro free_to_write "$INSTDIR\python\pythonw.exe"
        ${If} $1 == -1
            !insertmacro free_to_write "$INSTDIR\python\python.exe"
        ${EndIf}
        ${If} $1 == -1
            ${ExitDo}
        ${EndIf}
        ${If} ${Cmd} `MessageBox MB_RETRYCANCEL|MB_ICONEXCLAMATION "The program in $INSTDIR cannot be replaced: close Switchyard, then try again." /SD IDCANCEL IDCANCEL`
            SetErrorLevel 3
            Quit
        ${EndIf}
    ${Loop}
!macroend

Function .onInit
    ${IfNot} ${RunningX64}
        MessageBox MB_ICONSTOP "Switchyard needs a 64-bit Windows." /SD IDOK
        SetErrorLevel 2
        Quit
    ${EndIf}
    ${IfNot} ${AtLeastWin10}
        MessageBox MB_ICONSTOP "Switchyard needs Windows 10 or newer." /SD IDOK
        SetErrorLevel 2
        Quit
    ${EndIf}
    !insertmacro close_running
FunctionEnd

; What was unpacked so far would keep a full disk full.
Function .onInstFailed
    SetOutPath "$TEMP"
    RMDir /r "$INSTDIR.partial"
    MessageBox MB_ICONSTOP "Not all files could be written to $INSTDIR (is the disk full?). Nothing was changed." /SD IDOK
FunctionEnd

; Virus scanners hold new files for a moment, and with them their folders: $1 is 0 if a folder could not be moved in 5 s.
!macro move FROM TO
    StrCpy $1 10
    ${DoWhile} $1 > 0
        ClearErrors
        Rename "${FROM}" "${TO}"
        ${IfNot} ${Errors}
            StrCpy $1 -1
        ${Else}
            Sleep 500
            IntOp $1 $1 - 1
        ${EndIf}
    ${Loop}
!macroend

; The new version is unpacked beside the old one, and takes its place when it is whole: what stops in the middle (a full
; disk, a kill) leaves the old one working.
Section
    !insertmacro close_running ; in a folder that was chosen since
    RMDir /r "$INSTDIR.partial"
    SectionGetSize 0 $0 ; in KB, and what is compiled is more
    IntOp $0 $0 / 900
    ${GetRoot} "$INSTDIR" $1
    ClearErrors
    ${DriveSpace} "$1\" "/D=F /S=M" $1
    ${IfNot} ${Errors}
    ${AndIf} $1 <= $0
        MessageBox MB_ICONSTOP "Switchyard needs $0 MB on the disk of $INSTDIR, and $1 MB are free: make room. Nothing was changed." /SD IDOK
        SetErrorLevel 2
        Quit
    ${EndIf}
    SetOutPath "$INSTDIR.partial"
    ClearErrors
    SetOverwrite try
    File /r "@ROOT@/*"
    ${If} ${Errors}
        Abort
    ${EndIf}
    SetOutPath "$TEMP" ; nothing that is started now keeps the folder open
    WriteUninstaller "$INSTDIR.partial\uninstall.exe"
    ; Modules are compiled once, so that the window opens fast from the first time on.
    DetailPrint "Preparing the program"
    nsExec::Exec '"$INSTDIR.partial\python\python.exe" -I -m compileall -q --invalidation-mode unchecked-hash -s "$INSTDIR.partial" "$INSTDIR.partial\window"'
    Pop $0
    RMDir /r "$INSTDIR.old"
    ${If} ${FileExists} "$INSTDIR\bundle.json"
        !insertmacro move "$INSTDIR" "$INSTDIR.old"
        ${If} $1 == 0
            RMDir /r "$INSTDIR.partial"
            MessageBox MB_ICONSTOP "$INSTDIR is in use: close Switchyard and all windows that show this folder, then try again. Nothing was changed." /SD IDOK
            SetErrorLevel 3
            Quit
        ${EndIf}
    ${Else}
        RMDir "$INSTDIR"
    ${EndIf}
    !insertmacro move "$INSTDIR.partial" "$INSTDIR"
    ${If} $1 == 0
        Rename "$INSTDIR.old" "$INSTDIR"
        RMDir /r "$INSTDIR.partial"
        MessageBox MB_ICONSTOP "$INSTDIR holds other files: choose an empty folder. Nothing was changed." /SD IDOK
        SetErrorLevel 2
        Quit
    ${EndIf}
    RMDir /r "$INSTDIR.old"

    CreateDirectory "$SMPROGRAMS"
    CreateShortcut "$SMPROGRAMS\${NAME}.lnk" "$INSTDIR\Switchyard.exe" "" "$INSTDIR\switchyard.ico"

    WriteRegStr HKCU "${UNINSTALL}" "DisplayName" "${NAME}"
    WriteRegStr HKCU "${UNINSTALL}" "DisplayVersion" "${VERSION}"
    WriteRegStr HKCU "${UNINSTALL}" "DisplayIcon" "$INSTDIR\switchyard.ico"
    WriteRegStr HKCU "${UNINSTALL}" "Publisher" "The Switchyard developers"
    WriteRegStr HKCU "${UNINSTALL}" "InstallLocation" "$INSTDIR"
    WriteRegStr HKCU "${UNINSTALL}" "UninstallString" '"$INSTDIR\uninstall.exe"'
    WriteRegStr HKCU "${UNINSTALL}" "QuietUninstallString" '"$INSTDIR\uninstall.exe" /S'
    WriteRegDWORD HKCU "${UNINSTALL}" "NoModify" 1
    WriteRegDWORD HKCU "${UNINSTALL}" "NoRepair" 1
    ${GetSize} "$INSTDIR" "/S=0K" $0 $1 $2
    WriteRegDWORD HKCU "${UNINSTALL}" "EstimatedSize" $0

    ; GGUF files open with it; tables are offered it, and stay with the program that they have.
    WriteRegStr HKCU "${CLASSES}\Switchyard.gguf" "" "Language model (GGUF)"
    WriteRegStr HKCU "${CLASSES}\Switchyard.gguf\DefaultIcon" "" "$INSTDIR\switchyard.ico"
    WriteRegStr HKCU "${CLASSES}\Switchyard.gguf\shell\open\command" "" '"$INSTDIR\Switchyard.exe" "%1"'
    WriteRegStr HKCU "${CLASSES}\.gguf\OpenWithProgids" "Switchyard.gguf" ""
    WriteRegStr HKCU "${CLASSES}\.gguf" "" "Switchyard.gguf"
    WriteRegStr HKCU "${CLASSES}\Switchyard.rows" "" "Rows for Switchyard"
    WriteRegStr HKCU "${CLASSES}\Switchyard.rows\shell\open\command" "" '"$INSTDIR\Switchyard.exe" "%1"'
    !macro offer SUFFIX
        WriteRegStr HKCU "${CLASSES}\${SUFFIX}\OpenWithProgids" "Switchyard.rows" ""
    !macroend
    !insertmacro offer ".csv"
    !insertmacro offer ".jsonl"
    !insertmacro offer ".parquet"
    !insertmacro offer ".xlsx"
    System::Call 'shell32::SHChangeNotify(i 0x08000000, i 0, p 0, p 0)'
SectionEnd

; What is the user's stays, unless /MODELS or /CHATS is given, or its box is ticked on the page before removing.
Function un.onInit
    ${GetParameters} $0
    !macro given OPTION KEPT WORD
        StrCpy ${KEPT} "--keep-${WORD}"
        ClearErrors
        ${GetOptions} $0 "${OPTION}" $1
        ${IfNot} ${Errors}
            StrCpy ${KEPT} "--${WORD}"
        ${EndIf}
    !macroend
    !insertmacro given "/MODELS" $Models "models"
    !insertmacro given "/CHATS" $Chats "chats"
    !insertmacro close_running
FunctionEnd

Function un.Ask
    !insertmacro MUI_HEADER_TEXT "Remove ${NAME}" "Your models and chats stay, unless you tick them."
    nsDialogs::Create 1018
    Pop $0
    ${NSD_CreateLabel} 0 0 100% 24u "${NAME} is removed from $INSTDIR, with its engine and what it can make again."
    Pop $0
    ${NSD_CreateCheckBox} 0 34u 100% 12u "Remove my downloaded &models, too"
    Pop $ModelsBox
    ${NSD_CreateCheckBox} 0 50u 100% 12u "Remove my c&hats, jobs and settings, too"
    Pop $ChatsBox
    ${NSD_CreateLabel} 0 74u 100% 24u "What is not ticked stays on this PC, and ${NAME} finds it when it is installed again."
    Pop $0
    ${If} $Models == "--models"
        ${NSD_Check} $ModelsBox
    ${EndIf}
    ${If} $Chats == "--chats"
        ${NSD_Check} $ChatsBox
    ${EndIf}
    nsDialogs::Show
FunctionEnd

Function un.Answer
    !macro ticked BOX KEPT WORD
        StrCpy ${KEPT} "--keep-${WORD}"
        ${NSD_GetState} ${BOX} $0
        ${If} $0 == ${BST_CHECKED}
            StrCpy ${KEPT} "--${WORD}"
        ${EndIf}
    !macroend
    !insertmacro ticked $ModelsBox $Models "models"
    !insertmacro ticked $ChatsBox $Chats "chats"
FunctionEnd

Section "Uninstall"
    nsExec::Exec '"$INSTDIR\python\pythonw.exe" -I -X utf8 "$INSTDIR\uninstall.py" $Models $Chats'
    Pop $0

    Delete "$SMPROGRAMS\${NAME}.lnk"
    DeleteRegKey HKCU "${UNINSTALL}"
    DeleteRegKey HKCU "${CLASSES}\Switchyard.gguf"
    DeleteRegKey HKCU "${CLASSES}\Switchyard.rows"
    DeleteRegValue HKCU "${CLASSES}\.gguf\OpenWithProgids" "Switchyard.gguf"
    ReadRegStr $0 HKCU "${CLASSES}\.gguf" ""
    ${If} $0 == "Switchyard.gguf"
        DeleteRegValue HKCU "${CLASSES}\.gguf" ""
    ${EndIf}
    !macro retract SUFFIX
        DeleteRegValue HKCU "${CLASSES}\${SUFFIX}\OpenWithProgids" "Switchyard.rows"
        DeleteRegKey /ifempty HKCU "${CLASSES}\${SUFFIX}\OpenWithProgids"
        DeleteRegKey /ifempty HKCU "${CLASSES}\${SUFFIX}"
    !macroend
    !insertmacro retract ".gguf"
    !insertmacro retract ".csv"
    !insertmacro retract ".jsonl"
    !insertmacro retract ".parquet"
    !insertmacro retract ".xlsx"
    System::Call 'shell32::SHChangeNotify(i 0x08000000, i 0, p 0, p 0)'

    ; Only what was installed: the folder may be one that the user chose.
    ${If} ${FileExists} "$INSTDIR\bundle.json"
@REMOVALS@
        Delete "$INSTDIR\uninstall.exe"
        RMDir "$INSTDIR"
    ${EndIf}
    RMDir /r "$INSTDIR.partial"
    RMDir /r "$INSTDIR.old"
SectionEnd
